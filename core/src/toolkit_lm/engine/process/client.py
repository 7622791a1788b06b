"""Client of an engine in a process of its own, over ZeroMQ."""

from __future__ import annotations

import math
import signal
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress

import msgspec
import zmq
from msgspec.structs import replace

from toolkit_lm import errors
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.engine import wire
from toolkit_lm.engine.client import EngineClient, EngineInfo
from toolkit_lm.engine.process.launch import EngineProcess
from toolkit_lm.errors import ConfigError, EngineDeadError, PluginError, RequestError, ToolkitError
from toolkit_lm.kv import KVCacheConfig
from toolkit_lm.messages import EngineOutputs, EngineRequest
from toolkit_lm.params import FinishReason
from toolkit_lm.plugin import Plugins

_LOOK = 1.0
"""Seconds between two checks that the process lives. A fork of it may hold its lifeline open."""
_LAST_WORDS = 200
"""Milliseconds to wait for a dead process's last report, which may still arrive."""
_ENGINE_REGISTRIES = [
    "models",
    "attention_backends",
    "executors",
    "kernels",
    "kv_kinds",
    "kv_tiers",
    "logits_processors",
    "pooling",
    "scheduling_policies",
]
_ENGINE_HOOKS = tuple(f"toolkit_register_{registry}" for registry in _ENGINE_REGISTRIES)


class ProcessClient(EngineClient):
    """Sends commands to an engine process, and processes its reports. Once the process has died,
    every call raises the reason."""

    def __init__(self, config: VllmConfig, plugins: Plugins, process: EngineProcess) -> None:
        """Returns while the engine still loads. `config` is resolved except for the device. The
        client now owns the process.

        Raises PluginError for plugins that the process cannot have, and ConfigError for options
        that cannot be sent to it.
        """
        super().__init__(config)
        self.phase = "importing"
        self.process = process
        start = _encode_start(config, plugins)
        self._plugins = config.plugins
        self._kv_kinds = plugins.kv_kinds
        self._start_timeout = config.engine.start_timeout
        self._progress_time = time.monotonic()
        self._deadline = self._progress_time + self._start_timeout
        self._info: EngineInfo | None = None
        self._death: ToolkitError | None = None
        self._closed = False
        self._pending = EngineOutputs(time=self._progress_time)
        self._num_sent = 0
        self._finished: dict[tuple[str, int | None], int] = {}
        """Requests, or sequences of them, that this side has ended, with the number of commands
        sent by then. Earlier reports on them are outdated."""
        self._called: dict[int, Future[list[msgspec.Raw]]] = {}
        """Calls of workers on their way, by number."""
        self._wake_send, self._wake_recv = socket.socketpair()
        self._wake_send.setblocking(False)
        self._wake_recv.setblocking(False)
        self._context = zmq.Context()
        self._socket = wire.make_socket(self._context)
        self._socket.connect(process.address)
        self._poller = zmq.Poller()
        for source in (self._socket, process.lifeline, self._wake_recv):
            self._poller.register(source, zmq.POLLIN)
        self._send(start)

    @property
    def sources(self) -> tuple[zmq.Socket[bytes], socket.socket]:
        """Sockets that become readable when `step` has something to process: for a zmq.Poller,
        while the engine lives."""
        return self._socket, self.process.lifeline

    def wait_ready(self, timeout: float | None = None) -> EngineInfo | None:
        end = math.inf if timeout is None else time.monotonic() + timeout
        while self._info is None:
            self._check()
            now = time.monotonic()
            if now >= self._deadline:
                problem = (
                    f"the engine process was not ready after {self._start_timeout:g} seconds "
                    "(start_timeout)"
                )
                self._fail(EngineDeadError(f"{problem}: it was still {self.phase}."))
            elif now >= end or self._wait(min(end, self._deadline) - now):
                return None
        return self._info

    @property
    def progress_time(self) -> float:
        return self._progress_time

    def add(self, requests: Sequence[EngineRequest]) -> None:
        self._check()
        if not any(request.features for request in requests):
            self._add(requests)
            return
        with self.features.sending(requests) as (bare, evicted):
            self._add(bare, evicted)

    def finish(
        self, request_id: str, reason: FinishReason = "abort", index: int | None = None
    ) -> None:
        if self._death is None and not self._closed:
            self._send(wire.encode(wire.Finish(request_id, reason, index)))
            self._finished[request_id, index] = self._num_sent

    def reset_prefix_cache(self) -> None:
        self._check()
        self._send(wire.encode(wire.ResetPrefixCache()))

    def call_workers(self, method: str, payload: msgspec.Raw) -> Future[list[msgspec.Raw]]:
        self._check()
        number = self._num_sent
        self._send(wire.encode(wire.Call(number, method, payload)))
        future = self._called[number] = Future()
        return future

    def step(self, timeout: float | None = None) -> EngineOutputs:
        if not _has_any(self._pending):
            self._check()
            self._wait(timeout)
        return self._pop_outputs()

    def poll_outputs(self) -> EngineOutputs:
        if not _has_any(self._pending):
            self._check()
            self._handle_reports()
        return self._pop_outputs()

    def wake(self) -> None:
        # A full pipe wakes as well, and a closed one has no reader.
        with suppress(OSError):
            self._wake_send.send(b"\0")

    def dump_stacks(self) -> None:
        self.process.send_signal(signal.SIGUSR1)

    def shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            self._socket.close(linger=0)
            self._context.term()
            self.process.end()
            self._wake_send.close()
            self._wake_recv.close()
            why = self._death or EngineDeadError("the engine has been shut down.")
            while self._called:
                self._called.popitem()[1].set_exception(why)

    def _add(self, requests: Sequence[EngineRequest], evicted: Sequence[str] = ()) -> None:
        try:
            message = wire.encode(wire.add(requests, evicted))
        except Exception as error:
            # For instance a logits processor's argument that is not a plain value.
            raise RequestError(
                f"the request cannot be sent to the engine process: {type(error).__name__}: {error}"
            ) from error
        self._send(message)

    def _send(self, message: bytes) -> None:
        self._num_sent += 1
        self._socket.send(message)

    def _check(self) -> None:
        if self._death is not None:
            raise self._death
        if self._closed:
            raise EngineDeadError("the engine has been shut down.")

    def _wait(self, timeout: float | None) -> bool:
        """Processes reports. Waits until there are some, the process has died, or `timeout` seconds
        are over. Returns True after a `wake`."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            ready = dict(
                self._poller.poll(math.ceil(1000 * max(min(end - time.monotonic(), _LOOK), 0)))
            )
            self._handle_reports()
            if self.process.lifeline.fileno() in ready or not (ready or self.process.is_alive):
                self._on_exit()
                return False
            if self._wake_recv.fileno() in ready:
                self._wake_recv.recv(4096)
                return True
            if ready or time.monotonic() >= end:
                return False

    def _pop_outputs(self) -> EngineOutputs:
        outputs, self._pending = self._pending, EngineOutputs(time=self._progress_time)
        return outputs

    def _handle_reports(self) -> None:
        while True:
            try:
                message = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._handle(wire.decode_report(message.buffer))

    def _handle(self, report: wire.Report) -> None:
        self._progress_time = time.monotonic()
        if isinstance(report, wire.Outputs):
            self._add_outputs(report)
        elif isinstance(report, wire.Phase):
            self.phase = report.name
            self.process.disown_folder()
        elif isinstance(report, wire.Ready):
            # The front has further options: those of plugins given from code.
            config = replace(report.config, plugins=self._plugins)
            kv_cache = KVCacheConfig.decode(report.kv_cache, self._kv_kinds)
            self._info = EngineInfo(
                config=config,
                kv_cache=kv_cache,
                pooling=report.pooling,
                whole_items=report.whole_items,
            )
        elif isinstance(report, wire.Called):
            future = self._called.pop(report.number)
            if report.failed is None:
                # The report's memory is another's soon.
                future.set_result([msgspec.Raw(bytes(value)) for value in report.values])
            else:
                future.set_exception(_as_error(report.failed))
        else:
            self._death = _as_error(report)

    def _add_outputs(self, report: wire.Outputs) -> None:
        new = report.outputs
        pending = self._pending
        self._finished = {
            key: number for key, number in self._finished.items() if number > report.num_handled
        }
        stale = self._finished.keys()
        pending.time = new.time
        pending.outputs += [
            o
            for o in new.outputs
            if not stale or not stale & {(o.request_id, None), (o.request_id, o.index)}
        ]
        pending.admitted += new.admitted
        pending.events += new.events
        for request_id, names in new.missing.items() if new.missing else ():
            self.features.forget(names)
            if (request_id, None) not in stale:
                pending.missing = {**(pending.missing or {}), request_id: names}

    def _on_exit(self) -> None:
        """Finds out why the process has died."""
        while self._death is None and self._socket.poll(_LAST_WORDS):
            self._handle_reports()
        self._fail(self._death or self.process.death(self.phase if self._info is None else None))

    def _fail(self, why: ToolkitError) -> None:
        self._death = why
        self.shutdown()


def _encode_start(config: VllmConfig, plugins: Plugins) -> bytes:
    from_code = [
        info for info in plugins.infos if info.distribution is None and info.status == "ok"
    ]
    for info in from_code:
        if needed := [hook for hook in info.hooks if hook in _ENGINE_HOOKS]:
            raise PluginError(
                f"{info} implements {', '.join(needed)}, which the engine process needs too, but "
                "an object is known to this process only. "
                "Install it as a distribution with an entry point, or set engine_process to False."
            )
    names = {info.name for info in from_code}
    options = {
        name: values for name, values in config.plugins.plugin_option.items() if name not in names
    }
    config = replace(config, plugins=replace(config.plugins, plugin_option=options))
    try:
        message = wire.encode(
            wire.Start(config, plugins.fingerprint(installed=True), plugins.has_event_listeners)
        )
        if (
            msgspec.msgpack.decode(wire.encode(config.plugins), type=PluginsConfig)
            != config.plugins
        ):
            raise ValueError("options of plugins would arrive as other values")
    except Exception as error:
        raise ConfigError(
            f"the config cannot be sent to an engine process: {type(error).__name__}: {error}. "
            "Options of plugins must be plain values ("
            "texts, numbers, booleans, lists, mappings from texts), or engine_process must be "
            "False."
        ) from error
    return message


def _has_any(outputs: EngineOutputs) -> bool:
    return bool(outputs.outputs or outputs.admitted or outputs.events or outputs.missing)


def _as_error(report: wire.Failed) -> ToolkitError:
    """Converts the error that ended the engine process to an error of this process."""
    kind = getattr(errors, report.kind, None) if report.kind else None
    error: ToolkitError = (
        EngineDeadError(f"the engine failed: {report.message}")
        if kind is None
        else kind(report.message)
    )
    error.add_note(f"In the engine process:\n{report.traceback}")
    return error
