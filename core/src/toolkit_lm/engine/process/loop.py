"""What the engine process does: it loads an engine, then takes commands and sends outputs."""

from __future__ import annotations

import faulthandler
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import msgspec
import zmq

from toolkit_lm import errors
from toolkit_lm.engine.core import REST, EngineCore
from toolkit_lm.engine.feature_mirror import EngineFeatures
from toolkit_lm.engine.process import wire
from toolkit_lm.errors import PluginError, ToolkitError
from toolkit_lm.executor import make_executor
from toolkit_lm.messages import EngineOutput, EngineRequest
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution.resolution import resolve_device

_SEQUENCES_AT_ONCE = 256
"""Sequences that are added before a step. More would keep those that run waiting."""
_LOOK = 1000
"""Milliseconds between two looks of an idle engine at whether its workers live."""
_LAST_WORDS = 1000
"""Milliseconds that the last report gets to leave."""


def serve(folder: str, connected: Callable[[], None]) -> None:
    """Meets the front at the socket in `folder` and serves it until the engine fails; the front is
    told why.

    `connected` is called when both ends are, and the folder is of no more use.
    """
    context = zmq.Context()
    socket = wire.make_socket(context)
    socket.bind(f"ipc://{folder}/engine")
    try:
        start = wire.decode_command(socket.recv())
        assert isinstance(start, wire.Start)
        with suppress(ImportError):
            from setproctitle import setproctitle

            setproctitle(f"toolkit-lm engine {start.config.served_model_name}")
        connected()
        core = _load(start, lambda name: socket.send(wire.encode(wire.Phase(name))))
        socket.send(
            wire.encode(
                wire.Ready(
                    core.config,
                    msgspec.Raw(wire.encode(core.kv_cache)),
                    core.pooling,
                    core.whole_items,
                )
            )
        )
        _Loop(core, socket).run()
    except BaseException as error:
        socket.send(wire.encode(_failed(error)))
        socket.close(linger=_LAST_WORDS)
        context.term()


def _load(start: wire.Start, on_phase: Callable[[str], object]) -> EngineCore:
    with warnings.catch_warnings():
        # The front has warned.
        warnings.simplefilter("ignore")
        plugins = Plugins.load(start.config.plugins)
    if difference := start.fingerprint.difference(plugins.fingerprint()):
        raise PluginError(
            "the engine process has other plugins than its front ('here': the front; 'there': "
            f"the process):\n{difference}"
        )
    config = resolve_device(start.config)
    executor = make_executor(config, plugins)
    # Whoever asks for the stacks of this process gets those of its workers as well.
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *_: executor.dump_stacks())
    faulthandler.register(signal.SIGUSR1, chain=True)
    return EngineCore(config, plugins, executor, listening=start.listening, on_phase=on_phase)


class _Loop:
    """Commands in, outputs out, a step at a time."""

    def __init__(self, core: EngineCore, socket: zmq.Socket[bytes]) -> None:
        self._core = core
        self._socket = socket
        self._num_handled = 1
        """Commands; the first was Start."""
        self._refusals: list[EngineOutput] = []
        self._arriving: deque[deque[EngineRequest]] = deque()
        """Of each call, those that are not added yet. Calls take turns, so that a small one need
        not wait for a large one."""
        self._features = EngineFeatures()
        self._missing: dict[str, list[str]] = {}

    def run(self) -> None:
        """Until the engine fails: raises why."""
        while True:
            num_handled = self._num_handled
            progress = self._core.progress_time
            self._take_commands()
            outputs = self._core.step() if self._core.has_unfinished else self._core.poll_outputs()
            outputs.outputs += self._refusals
            self._refusals = []
            if self._missing:
                outputs.missing, self._missing = self._missing, {}
            if not outputs.outputs and (num_handled, progress) == (
                self._num_handled,
                self._core.progress_time,
            ):
                # A sign of life would be a lie.
                continue
            # Large arrays among it are not copied.
            self._socket.send(wire.encode(wire.Outputs(outputs, self._num_handled)), copy=False)

    def _take_commands(self) -> None:
        """All that have come; where there is nothing else to do, waits for one."""
        if not self._core.has_unfinished and not self._arriving:
            while not self._socket.poll(_LOOK):
                self._core.executor.check()
            self._handle(self._socket.recv())
        elif self._core.num_idle > 1:
            self._socket.poll(round(REST * 1000))
        with suppress(zmq.Again):
            while True:
                self._handle(self._socket.recv(zmq.NOBLOCK))
        self._add_some(_SEQUENCES_AT_ONCE)

    def _handle(self, message: bytes) -> None:
        self._num_handled += 1
        command = wire.decode_command(message)
        if isinstance(command, wire.Add):
            requests = wire.added(command)
            if any(one.features for one in requests):
                self._missing |= (missing := self._features.take_in(0, requests, command.evicted))
                requests = [one for one in requests if one.request_id not in missing]
            self._arriving.append(deque(requests))
            return
        # It may be about them.
        self._add_some(sys.maxsize)
        if isinstance(command, wire.Finish):
            self._core.finish(command.request_id, command.reason, command.index)
        elif isinstance(command, wire.ResetPrefixCache):
            self._core.reset_prefix_cache()

    def _add_some(self, num_sequences: int) -> None:
        while self._arriving and num_sequences > 0:
            call = self._arriving.popleft()
            if call:
                request = call.popleft()
                self._arriving.append(call)
                self._add(request)
                num_sequences -= request.params.num_sequences

    def _add(self, request: EngineRequest) -> None:
        try:
            self._core.add_request(request)
        except Exception as error:
            # Whatever it is, it is this request's: the others go on.
            what = (
                str(error)
                if isinstance(error, ToolkitError)
                else f"{type(error).__name__}: {error}"
            )
            params = request.params
            sequences = range(params.n if params.use_beam_search else params.num_sequences)
            self._refusals += [
                EngineOutput(
                    request_id=request.request_id, index=i, finish_reason="error", error=what
                )
                for i in sequences
            ]


def _failed(error: BaseException) -> wire.Failed:
    kind = next(
        (one.__name__ for one in type(error).__mro__ if one.__module__ == errors.__name__), ""
    )
    message = str(error) if kind else f"{type(error).__name__}: {error}"
    return wire.Failed(kind, message, "".join(traceback.format_exception(error)))
