"""Several engines as one: requests are shared between them, and those of a dead one go on with
another."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress

from msgspec import Raw
from msgspec.structs import replace
from toolkit_lm.config import VllmConfig
from toolkit_lm.engine import EngineClient, EngineFeatures, EngineInfo, EngineState
from toolkit_lm.errors import ConfigError, EngineDeadError, RequestError, ToolkitError
from toolkit_lm.events import Event, LoadEvent, RequestEvent
from toolkit_lm.kv import PrefixHashes
from toolkit_lm.messages import EngineOutput, EngineOutputs, EngineRequest
from toolkit_lm.params import FinishReason
from toolkit_lm.plugin import Plugins

from toolkit_lm_data_parallel.engine import Engine
from toolkit_lm_data_parallel.in_flight import InFlight
from toolkit_lm_data_parallel.polling import Polling
from toolkit_lm_data_parallel.routing import choose

logger = logging.getLogger(__name__)

_MOST_HASHED = 512
"""Blocks of a prompt by which an engine is chosen."""


class DataParallelClient(EngineClient):
    """Several engines with a copy of the model each, in processes of their own.

    It knows exactly which requests each has in flight: requests and outputs go through it. An
    engine that dies is restarted up to `restart_engine` times. Meanwhile its requests continue on
    another engine from the tokens that they have, and their clients notice nothing.

    Media items are sent to this client once, and from here to each engine that reads them: each has
    a mirror of its own."""

    def __init__(self, config: VllmConfig, plugins: Plugins, max_moves: int) -> None:
        """Starts all engines at once. `max_moves`: how many may die under a request. Raises
        ToolkitError."""
        super().__init__(config)
        self._config = config
        self._plugins = plugins
        self._max_moves = max_moves
        self._held = EngineFeatures()
        self._caches = config.cache.enable_prefix_caching is not False
        self._info: EngineInfo | None = None
        """Set once all engines have been ready."""
        self._death: ToolkitError | None = None
        self._closed = False
        self._news = EngineOutputs(time=time.monotonic())
        self._polling = Polling()
        self._engines = [Engine(number) for number in range(config.parallel.data_parallel_size)]
        self.phase = "importing"
        try:
            for engine in self._engines:
                engine.start(config, plugins)
        except ToolkitError as error:
            self.shutdown()
            raise self._named(engine, error) from None
        except BaseException:
            self.shutdown()
            raise
        self._polling.watch(self._engines)

    @property
    def engines(self) -> Sequence[EngineState]:  # type: ignore[override]
        return [engine.state for engine in self._engines]

    @property
    def progress_time(self) -> float:
        times = [found for engine in self._engines if (found := engine.progress_time) is not None]
        # One that waits for a start is not said to stall.
        return min(times, default=time.monotonic())

    def wait_ready(self, timeout: float | None = None) -> EngineInfo | None:
        end = math.inf if timeout is None else time.monotonic() + timeout
        while self._info is None:
            self._check()
            self._collect([engine for engine in self._engines if engine.info is None])
            if self._info is not None or self._death is not None:
                continue
            left = end - time.monotonic()
            if left <= 0 or self._polling.wait(left) is None:
                return None
        return self._info

    # Requests

    def add(self, requests: Sequence[EngineRequest]) -> None:
        self._check()
        if not any(request.features for request in requests):
            self._add(requests)
            return
        with self.features.sending(requests) as (whole, evicted):
            new = [
                feature.mm_identifier
                for request in whole
                for feature in request.features
                if feature.data is not None
            ]
            missing = self._held.fill(0, whole, evicted)
            assert not missing, "nothing comes between both sides"
            try:
                self._add(whole)
            except RequestError:
                # The mirror does not count them as sent.
                self._held.fill(0, (), new)
                raise

    def _add(self, requests: Sequence[EngineRequest]) -> None:
        added = [InFlight(added_request, self._hashes(added_request)) for added_request in requests]
        try:
            self._send(added)
        except RequestError:
            for added_request in added:
                self.finish(added_request.request.request_id)
            raise

    def _hashes(self, request: EngineRequest) -> list[bytes]:
        if not self._caches or request.encoder is not None:
            return []
        size = self._config.cache.block_size
        # The last token is computed in any case.
        count = min((len(request.prompt_token_ids) - 1) // size, _MOST_HASHED)
        return PrefixHashes("", request.cache_keys).block_hashes(
            request.prompt_token_ids, size, count
        )

    def _send(self, requests: Sequence[InFlight]) -> None:
        """To the engines that are chosen for them, together. Raises RequestError, after which some
        may have been sent."""
        # One that is being started takes requests too: they wait there.
        able = [engine for engine in self._engines if engine.info is not None] or [
            engine for engine in self._engines if engine.client is not None
        ]
        chosen: dict[int, list[InFlight]] = {}
        for message in requests:
            engine = able[
                choose([each.choice(message, self._config.cache.block_size) for each in able])
            ]
            engine.add(message)
            chosen.setdefault(engine.number, []).append(message)
        for number, assigned in chosen.items():
            # A death shows, and is dealt with, where outputs are taken.
            with suppress(EngineDeadError):
                self._engines[number].send(assigned)

    def finish(
        self, request_id: str, reason: FinishReason = "abort", index: int | None = None
    ) -> None:
        for engine in self._engines:
            if (request := engine.requests.get(request_id)) is None:
                continue
            if engine.client is not None:
                engine.client.finish(request_id, reason, index)
            if index is not None:
                before = request.num_tokens
                request.end(reason, index)
                engine.num_tokens += request.num_tokens - before
            if index is None or request.has_ended:
                engine.remove(request)
                if self._plugins.has_event_listeners:
                    engine.ending[request_id] = request, reason

    def reset_prefix_cache(self) -> None:
        self._check()
        for engine in self._engines:
            engine.forget_prefixes()
            if engine.client is not None:
                with suppress(ToolkitError):
                    engine.client.reset_prefix_cache()

    def call_workers(self, method: str, payload: Raw) -> Future[list[Raw]]:
        """Answers of all live engines, one engine's after another's. An engine that is starting
        answers when it is ready. Each takes the call, even if another fails."""
        self._check()
        calls: list[Future[list[Raw]]] = []
        for engine in self._engines:
            if engine.client is not None:
                # A death shows, and is dealt with, where outputs are taken.
                with suppress(EngineDeadError):
                    calls.append(engine.client.call_workers(method, payload))
        answers: Future[list[Raw]] = Future()
        waiting = list(calls)

        def collect(call: Future[list[Raw]]) -> None:
            waiting.remove(call)
            if not waiting:
                try:
                    answers.set_result([value for call in calls for value in call.result()])
                except ToolkitError as error:
                    answers.set_exception(error)

        for call in calls:
            call.add_done_callback(collect)
        return answers

    # Outputs

    def step(self, timeout: float | None = None) -> EngineOutputs:
        if not _has_any(self._news):
            self._check()
            self._collect(self._polling.wait(math.inf if timeout is None else timeout) or ())
        return self._drain_outputs()

    def poll_outputs(self) -> EngineOutputs:
        if not _has_any(self._news):
            self._check()
            self._collect(self._engines)
        return self._drain_outputs()

    def wake(self) -> None:
        self._polling.wake()

    def dump_stacks(self) -> None:
        for engine in self._engines:
            if (client := engine.client) is not None:
                client.dump_stacks()

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        # All of them end at once.
        for engine in self._engines:
            if engine.client is not None:
                engine.client.process.lifeline.close()
        for engine in self._engines:
            engine.end(engine.error)
        self._polling.close()
        self._held.leave(0)

    def _check(self) -> None:
        if self._death is not None:
            raise self._death
        if self._closed:
            raise EngineDeadError("the engines have been shut down.")

    def _drain_outputs(self) -> EngineOutputs:
        news, self._news = self._news, EngineOutputs(time=self._news.time)
        return news

    def _collect(self, engines: Collection[Engine]) -> None:
        """Takes in what engines have said, and buries those that have died."""
        for engine in list(engines):
            if (client := engine.client) is None:
                continue
            try:
                self._merge(engine, client.step(0))
                # Now that its last words are taken in, it says that it is dead.
                self._merge(engine, client.poll_outputs())
                if engine.info is None and (info := client.wait_ready(0)) is not None:
                    self._set_ready(engine, info)
            except ToolkitError as error:
                self._bury(engine, error)
        if self._info is None and self._death is None:
            starting = [engine for engine in self._engines if engine.info is None]
            ready = len(self._engines) - len(starting)
            first = starting[0].state.reason if starting else ""
            self.phase = (
                f"{first}, {ready} of {len(self._engines)} engines being ready" if ready else first
            )

    def _merge(self, engine: Engine, new: EngineOutputs) -> None:
        news = self._news
        news.time = max(news.time, new.time)
        news.admitted += new.admitted
        # Before the outputs, which may be the last of a request.
        news.events += [
            shown for event in new.events if (shown := _forwarded(engine, event)) is not None
        ]
        for output in new.outputs:
            if (request := engine.requests.get(output.request_id)) is None:
                continue
            before = request.num_tokens
            request.update(output)
            engine.num_tokens += request.num_tokens - before
            if request.has_ended:
                engine.remove(request)
            news.outputs.append(output)
        for request_id in new.missing or ():
            if (request := engine.requests.get(request_id)) is not None:
                self._send_again(engine, request)

    def _send_again(self, engine: Engine, request: InFlight) -> None:
        """With the data of its media, which its engine lacks: once."""
        try:
            if request.was_lacking:
                raise RequestError(
                    "the engine has lost the data of its images or other media, twice."
                )
            request.was_lacking = True
            engine.send([request])
        except RequestError as error:
            engine.remove(request)
            self._fail(request, str(error))

    def _fail(self, request: InFlight, error: str) -> None:
        request_id = request.request.request_id
        self._news.outputs += [
            EngineOutput(request_id=request_id, index=index, finish_reason="error", error=error)
            for index in request.unfinished
        ]

    # Engines come and go

    def _set_ready(self, engine: Engine, info: EngineInfo) -> None:
        engine.set_ready(info)
        first = next(engine.info for engine in self._engines if engine.info is not None)
        if (device := info.config.device.device.partition(":")[0]) != (
            other := first.config.device.device.partition(":")[0]
        ):
            size = len(self._engines)
            raise ConfigError(
                f"it runs on {device}, and another on {other}: there are not {size} times as "
                "many GPUs as one engine needs."
            )
        infos = [engine.info for engine in self._engines if engine.info is not None]
        if self._info is None and len(infos) == len(self._engines):
            # A request must fit every engine, so the smallest counts.
            least = min(infos, key=lambda info: [pool.num_blocks for pool in info.kv_cache.pools])
            self._info = replace(infos[0], kv_cache=least.kv_cache)
            self.phase = ""
        elif self._info is not None:
            logger.warning("engine %d is ready again", engine.number)

    def _named(self, engine: Engine, error: ToolkitError) -> ToolkitError:
        """`error`, which says of which engine it is."""
        error.args = (f"engine {engine.number} of {len(self._engines)}: {error}", *error.args[1:])
        return error

    def _bury(self, engine: Engine, error: ToolkitError) -> None:
        """An engine has died: starts it anew, if it may, and has others go on with its requests. At
        the start, all end with it."""
        had_started = engine.info is not None
        untold = [
            event
            for request, reason in engine.ending.values()
            if (event := request.untold(reason)) is not None
        ]
        left = engine.end(self._named(engine, error))
        if self._info is None:
            self._death = error
            return
        while engine.client is None and engine.num_restarts < self._config.engine.restart_engine:
            engine.num_restarts += 1
            try:
                engine.start(self._config, self._plugins)
            except ToolkitError as another:
                engine.error = self._named(engine, another)
        self._polling.watch(self._engines)
        then = (
            "is started anew"
            if engine.client is not None
            else "is not started anew (restart_engine)"
        )
        logger.error(
            "an engine has died, and %s; others go on with its %d requests: %s",
            then,
            len(left),
            error,
        )
        if self._plugins.has_event_listeners:
            self._news.events += [
                *(replace(event, engine=engine.number) for event in untold),
                _empty(engine),
            ]
        if all(engine.client is None for engine in self._engines):
            self._death = EngineDeadError(
                f"all {len(self._engines)} engines have died, the last of this: {error}"
            )
            self._death.__cause__ = error
            return
        self._move(left, error, had_started)

    def _move(self, left: Sequence[InFlight], error: ToolkitError, had_started: bool) -> None:
        """Has other engines go on with the requests of one that has died."""
        going_on = []
        for request in left:
            # Where it had not begun to serve, they cannot be what it died of.
            request.num_moves += had_started
            request.was_lacking = False
            if request.num_moves > self._max_moves:
                times = (
                    f"{request.num_moves} engines have died under the request (the most is "
                    f"data_parallel.max_moves, {self._max_moves})"
                )
                self._fail(request, f"{times}. The last: {error}")
            else:
                going_on.append(request)
        for request in going_on:
            try:
                self._send([request])
            except RequestError as refused:
                self._engines[request.engine].remove(request)
                self._fail(request, str(refused))


def _forwarded(engine: Engine, event: Event) -> Event | None:
    """An engine's event as those who watch are to hear it."""
    shown: Event | None = event
    if isinstance(event, RequestEvent):
        if event.kind in ("finished", "aborted"):
            engine.ending.pop(event.request_id, None)
        if (request := engine.requests.get(event.request_id)) is not None:
            shown = request.forwarded(event)
    return shown if shown is None or engine.number == 0 else replace(shown, engine=engine.number)


def _empty(engine: Engine) -> LoadEvent:
    """Load of a dead engine: none."""
    return LoadEvent(
        time=time.monotonic(),
        num_running=0,
        num_waiting=0,
        num_used_blocks=0,
        num_total_blocks=0,
        engine=engine.number,
    )


def _has_any(outputs: EngineOutputs) -> bool:
    return bool(outputs.outputs or outputs.admitted or outputs.events or outputs.missing)
