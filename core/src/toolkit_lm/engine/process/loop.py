"""The main loop of the engine process: it loads an engine, then processes commands and sends
outputs."""

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
from toolkit_lm.engine import wire
from toolkit_lm.engine.core import REST, EngineCore
from toolkit_lm.engine.feature_mirror import EngineFeatures
from toolkit_lm.errors import EngineDeadError, PluginError, ToolkitError
from toolkit_lm.executor import make_executor
from toolkit_lm.messages import EngineOutput, EngineRequest
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution.resolution import resolve_device

_SEQUENCES_AT_ONCE = 256
"""Most sequences that are added before a step. More would delay the running ones."""
_LOOK = 1000
"""Milliseconds between two checks of an idle engine that its workers live."""
_LAST_WORDS = 1000
"""Milliseconds that the last report gets to be sent."""


def serve(folder: str, connected: Callable[[], None]) -> None:
    """Connects to the front at the socket in `folder`, and serves it until the engine fails. The
    front gets the reason.

    `connected` is called when both ends are connected, and the folder is no longer needed.
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
    # A request for the stacks of this process includes those of its workers.
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *_: executor.dump_stacks())
    faulthandler.register(signal.SIGUSR1, chain=True)
    return EngineCore(config, plugins, executor, listening=start.listening, on_phase=on_phase)


class _Loop:
    """Commands in, outputs out, one step at a time."""

    def __init__(self, core: EngineCore, socket: zmq.Socket[bytes]) -> None:
        self._core = core
        self._socket = socket
        self._num_handled = 1
        """Number of handled commands; the first was Start."""
        self._refusals: list[EngineOutput] = []
        self._arriving: deque[deque[EngineRequest]] = deque()
        """Requests of each call that are not added yet. Calls take turns, so that a small one need
        not wait for a large one."""
        self._features = EngineFeatures()
        self._missing: dict[str, list[str]] = {}

    def run(self) -> None:
        """Runs until the engine fails; raises the reason."""
        while True:
            num_handled = self._num_handled
            progress = self._core.progress_time
            self._handle_commands()
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
            # Large arrays in the message are not copied.
            self._socket.send(wire.encode(wire.Outputs(outputs, self._num_handled)), copy=False)

    def _handle_commands(self) -> None:
        """Handles all commands that have arrived. Waits for one if there is nothing else to do."""
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
            if any(request.features for request in requests):
                self._missing |= (missing := self._features.fill(0, requests, command.evicted))
                requests = [request for request in requests if request.request_id not in missing]
            self._arriving.append(deque(requests))
            return
        # The failure may be about them.
        self._add_some(sys.maxsize)
        if isinstance(command, wire.Finish):
            self._core.finish(command.request_id, command.reason, command.index)
        elif isinstance(command, wire.ResetPrefixCache):
            self._core.reset_prefix_cache()
        elif isinstance(command, wire.Call):
            self._socket.send(wire.encode(self._called(command)))

    def _called(self, call: wire.Call) -> wire.Called:
        try:
            return wire.Called(call.number, self._core.call_workers(call.method, call.payload))
        except EngineDeadError:
            raise
        except ToolkitError as error:
            return wire.Called(call.number, [], _failed(error))

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
            # Any error here concerns this request alone: the others continue.
            message = (
                str(error)
                if isinstance(error, ToolkitError)
                else f"{type(error).__name__}: {error}"
            )
            params = request.params
            sequences = range(params.n if params.use_beam_search else params.num_sequences)
            self._refusals += [
                EngineOutput(
                    request_id=request.request_id, index=i, finish_reason="error", error=message
                )
                for i in sequences
            ]


def _failed(error: BaseException) -> wire.Failed:
    kind = next(
        (base.__name__ for base in type(error).__mro__ if base.__module__ == errors.__name__), ""
    )
    message = str(error) if kind else f"{type(error).__name__}: {error}"
    return wire.Failed(kind, message, "".join(traceback.format_exception(error)))
