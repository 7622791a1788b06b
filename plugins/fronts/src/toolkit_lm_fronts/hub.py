"""The engine's side: one engine, whose requests come from several fronts."""

from __future__ import annotations

import logging
import shutil
import socket
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import zmq
from msgspec.structs import replace
from toolkit_lm import LLMEngine
from toolkit_lm.config import VllmConfig
from toolkit_lm.engine import EngineFeatures, EngineInfo, ProcessClient, wire
from toolkit_lm.errors import ConfigError, PluginError, RequestError, ToolkitError
from toolkit_lm.events import RequestEvent
from toolkit_lm.messages import EngineOutput, EngineOutputs, EngineRequest

from toolkit_lm_fronts.meeting import Welcome, check_peer

_LOOK = 500
"""Milliseconds from one check of an idle engine to the next."""
_MOMENT = 0.001
"""Seconds in which reports of an engine that starts are taken."""
_LAST_WORDS = 1000
"""Milliseconds that the last report gets to be sent."""
_OWN = ("engine", "renderer", "limits", "plugins", "node", "checkpoint")
"""Sections of the config that each front has for itself."""
_MARK = "/"
"""Between a front's number and its own id of a request."""

logger = logging.getLogger(__name__)


class Front:
    """A front that is connected."""

    def __init__(self, number: int, connection: socket.socket, pair: zmq.Socket[bytes]) -> None:
        self.number = number
        self.connection = connection
        self.pair = pair
        self.is_started = False
        """Its first command has come, and fits."""
        self.is_ready = False
        """It was told that the engine is ready."""
        self.listens = False
        self.num_handled = 0
        self.live: dict[str, int] = {}
        """Its requests under way, by its own ids, and their sequences that go on."""

    def ended(self, request_id: str, num_sequences: int = 1) -> None:
        """Sequences of a request have ended. Others than its own are accepted."""
        self.live[request_id] = self.live.get(request_id, 0) - num_sequences
        if self.live[request_id] <= 0:
            del self.live[request_id]

    def send(self, report: wire.Report) -> None:
        self.pair.send(wire.encode(report), copy=False)


class Hub:
    """Passes commands of fronts to an engine, and its reports to the front that each is for.

    Each front has a cache of media of its own: what one has sent, no other can name. All of it runs
    in one thread.
    """

    def __init__(self, engine: LLMEngine, listener: socket.socket) -> None:
        """`engine`: not ready yet. `listener`: a Unix socket."""
        if not isinstance(engine.client, ProcessClient):
            raise ConfigError(
                "`toolkit engine` runs one engine in a process: leave data_parallel_size out."
            )
        self._engine = engine
        self._asked = engine.config
        self._client = engine.client
        self._listener = listener
        self._info: EngineInfo | None = None
        self._features = EngineFeatures()
        self._fronts: dict[int, Front] = {}
        self._calls: list[tuple[Front, int, Any]] = []
        """Calls of workers on their way: the front, its number of the call, the future."""
        self._num_fronts = 0
        self._progress = 0.0
        self._phase = ""
        self._ending = ExitStack()
        self._folder = Path(tempfile.mkdtemp(prefix="toolkit_lm-"))
        self._ending.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self._context = zmq.Context()
        self._ending.callback(self._context.term)
        self._poller = zmq.Poller()
        for source in (listener, *self._client.sources):
            self._poller.register(source, zmq.POLLIN)

    def run(self, is_stopped: Callable[[], bool]) -> None:
        """Serves fronts until it is stopped, or the engine dies: then all are told, and
        EngineDeadError is raised."""
        try:
            while not is_stopped():
                self._step()
        except ToolkitError as error:
            for front in self._fronts.values():
                front.send(wire.Failed(type(error).__name__, str(error), ""))
            raise
        finally:
            for front in [*self._fronts.values()]:
                self._leave(front)
            self._ending.close()

    def _step(self) -> None:
        ready = dict(self._poller.poll(_LOOK))
        if self._listener.fileno() in ready:
            self._accept()
        for front in [*self._fronts.values()]:
            # The end counts: commands that came before it are void.
            if front.connection.fileno() in ready:
                self._leave(front)
            elif front.pair in ready:
                self._read_commands(front)
        if self._info is None:
            self._info = self._client.wait_ready(_MOMENT)
            self._greet()
        outputs = self._client.step(0) if self._info is not None else None
        self._pass_on(outputs)
        self._answer_calls()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        try:
            check_peer(connection)
            self._num_fronts += 1
            address = f"ipc://{self._folder / str(self._num_fronts)}"
            pair = wire.make_socket(self._context)
            pair.bind(address)
            welcome = Welcome(address, self._client.process.pid)
            connection.sendall(msgspec.json.encode(welcome) + b"\n")
        except OSError as error:
            logger.warning("A front was not let in: %s", error)
            connection.close()
            return
        front = self._fronts[self._num_fronts] = Front(self._num_fronts, connection, pair)
        self._poller.register(connection, zmq.POLLIN)
        self._poller.register(pair, zmq.POLLIN)
        logger.info("Front %d has come", front.number)

    def _leave(self, front: Front) -> None:
        """A front has gone, with its requests and its media."""
        del self._fronts[front.number]
        self._poller.unregister(front.connection)
        self._poller.unregister(front.pair)
        for request_id in front.live:
            self._client.finish(f"{front.number}{_MARK}{request_id}")
        self._features.leave(front.number)
        self._calls = [call for call in self._calls if call[0] is not front]
        front.connection.close()
        front.pair.close(linger=_LAST_WORDS)
        logger.info("Front %d has gone, with %d requests", front.number, len(front.live))

    def _greet(self) -> None:
        """Tells fronts how far the engine is."""
        for front in self._fronts.values():
            if not front.is_started or front.is_ready:
                continue
            if self._info is None:
                if self._client.phase != self._phase:
                    front.send(wire.Phase(self._client.phase))
                continue
            info = self._info
            front.is_ready = True
            kv_cache = msgspec.Raw(wire.encode(info.kv_cache))
            front.send(wire.Ready(info.config, kv_cache, info.pooling, info.whole_items))
        self._phase = self._client.phase

    def _read_commands(self, front: Front) -> None:
        """Takes the commands that have come from a front. One that says nonsense has to go."""
        try:
            while True:
                command = wire.decode_command(front.pair.recv(zmq.NOBLOCK))
                front.num_handled += 1
                if not (front.is_started or isinstance(command, wire.Start)):
                    raise msgspec.ValidationError("the first command must be Start")
                self._handle(front, command)
        except zmq.Again:
            return
        except msgspec.DecodeError as error:
            logger.warning("Front %d is sent away: %s", front.number, error)
            self._leave(front)

    def _handle(self, front: Front, command: wire.Command) -> None:
        if isinstance(command, wire.Start):
            if (wrong := self._difference(command)) is not None:
                front.send(wire.Failed(type(wrong).__name__, str(wrong), ""))
                return
            front.is_started = True
            front.listens = command.listening
            self._greet()
        elif isinstance(command, wire.Add):
            self._add(front, wire.added(command), command.evicted)
        elif isinstance(command, wire.Finish):
            name = f"{front.number}{_MARK}{command.request_id}"
            self._client.finish(name, command.reason, command.index)
            left = front.live.get(command.request_id, 1)
            front.ended(command.request_id, left if command.index is None else 1)
        elif isinstance(command, wire.ResetPrefixCache):
            self._client.reset_prefix_cache()
        else:
            called = self._client.call_workers(command.method, command.payload)
            self._calls.append((front, command.number, called))

    def _difference(self, start: wire.Start) -> ToolkitError | None:
        """Why a front does not fit the engine. None: it does."""
        here = self._engine.plugins.fingerprint(installed=True)
        if difference := start.fingerprint.difference(here):
            return PluginError(
                "the engine has other plugins than its front ('here': the front; 'there': the "
                f"engine):\n{difference}"
            )
        if found := differences(start.config, self._asked):
            return ConfigError(
                "the front asks for another engine than the one it is to share: "
                f"{'; '.join(found)}. Give both commands the same options."
            )
        return None

    def _add(self, front: Front, requests: list[EngineRequest], evicted: list[str]) -> None:
        missing = self._features.fill(front.number, requests, evicted)
        if missing:
            self._send(front, EngineOutputs(time=self._client.progress_time, missing=missing))
        fitting = [request for request in requests if request.request_id not in missing]
        for request in fitting:
            named = replace(request, request_id=f"{front.number}{_MARK}{request.request_id}")
            front.live[request.request_id] = _num_sequences(request)
            try:
                self._client.add([named])
            except RequestError as error:
                self._refuse(front, request, error)

    def _refuse(self, front: Front, request: EngineRequest, error: RequestError) -> None:
        refused = [
            EngineOutput(
                request_id=request.request_id, index=index, finish_reason="error", error=str(error)
            )
            for index in range(front.live.pop(request.request_id))
        ]
        self._send(front, EngineOutputs(time=self._client.progress_time, outputs=refused))

    def _send(self, front: Front, outputs: EngineOutputs) -> None:
        front.send(wire.Outputs(outputs, front.num_handled))

    def _pass_on(self, outputs: EngineOutputs | None) -> None:
        """Sends each front what is its own, and, while it has requests, a sign of life of each
        step."""
        if outputs is None:
            return
        progress = self._client.progress_time
        split = {number: EngineOutputs(time=outputs.time) for number in self._fronts}
        for output in outputs.outputs:
            if (found := self._own(split, output.request_id)) is not None:
                found[0].outputs.append(replace(output, request_id=found[1]))
                if output.finish_reason is not None:
                    self._fronts[int(output.request_id.partition(_MARK)[0])].ended(found[1])
        for name in outputs.admitted:
            if (found := self._own(split, name)) is not None:
                found[0].admitted.append(found[1])
        for event in outputs.events:
            if isinstance(event, RequestEvent):
                if (found := self._own(split, event.request_id)) is not None:
                    found[0].events.append(replace(event, request_id=found[1]))
            else:
                for each in split.values():
                    each.events.append(event)
        for name, items in (outputs.missing or {}).items():
            if (found := self._own(split, name)) is not None:
                found[0].missing = {**(found[0].missing or {}), found[1]: items}
        for number, own in split.items():
            front = self._fronts[number]
            if not front.listens:
                own.events = []
            if (
                own.outputs
                or own.admitted
                or own.events
                or own.missing
                or (front.live and progress != self._progress)
            ):
                self._send(front, own)
        self._progress = progress

    def _own(self, split: dict[int, EngineOutputs], name: str) -> tuple[EngineOutputs, str] | None:
        """The outputs of the front that a request is of, and its own id. None: it has gone."""
        number, _, request_id = name.partition(_MARK)
        own = split.get(int(number))
        return None if own is None else (own, request_id)

    def _answer_calls(self) -> None:
        waiting = []
        for front, number, called in self._calls:
            if not called.done():
                waiting.append((front, number, called))
            elif (error := called.exception()) is None:
                front.send(wire.Called(number, called.result()))
            else:
                failed = wire.Failed(type(error).__name__, str(error), "")
                front.send(wire.Called(number, [], failed))
        self._calls = waiting


def _num_sequences(request: EngineRequest) -> int:
    params = request.params
    return params.n if params.use_beam_search else params.num_sequences


def differences(front: VllmConfig, engine: VllmConfig) -> list[str]:
    """Options of the engine that a front has otherwise. None asks for nothing."""
    return [
        f"{name} is {getattr(there, name)!r} there, and {value!r} in the front"
        for section in VllmConfig.__struct_fields__
        if section not in _OWN
        for there in [getattr(engine, section)]
        for name in type(there).__struct_fields__
        if (value := getattr(getattr(front, section), name)) not in (None, getattr(there, name))
    ]
