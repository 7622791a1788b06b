"""Several engines as one: requests are shared between them, and those of a dead one go on with
another."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Sequence
from contextlib import suppress

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
    """Engines with a copy of the model each, in processes of their own.

    It knows exactly what each has in flight: requests come and outputs go through it. An engine
    that dies is started anew as often as `restart_engine` says. Its requests go on with another
    meanwhile, from the tokens that they have; nobody hears of it.

    Items of media are sent to this client once, and from here to each engine that reads them: each
    has a mirror of its own.
    """

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
            self._take_from([engine for engine in self._engines if engine.info is None])
            if self._info is not None or self._death is not None:
                continue
            left = end - time.monotonic()
            if left <= 0 or self._polling.wait(left) is None:
                return None
        return self._info

    # Requests

    def add(self, requests: Sequence[EngineRequest]) -> None:
        self._check()
        if not any(one.features for one in requests):
            self._add(requests)
            return
        with self.features.sending(requests) as (whole, evicted):
            new = [
                one.mm_identifier
                for request in whole
                for one in request.features
                if one.data is not None
            ]
            missing = self._held.take_in(0, whole, evicted)
            assert not missing, "nothing comes between both sides"
            try:
                self._add(whole)
            except RequestError:
                # The mirror does not count them as sent.
                self._held.take_in(0, (), new)
                raise

    def _add(self, requests: Sequence[EngineRequest]) -> None:
        added = [InFlight(one, self._hashes(one)) for one in requests]
        try:
            self._send(added)
        except RequestError:
            for one in added:
                self.finish(one.request.request_id)
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
        able = [one for one in self._engines if one.info is not None] or [
            one for one in self._engines if one.client is not None
        ]
        chosen: dict[int, list[InFlight]] = {}
        for one in requests:
            engine = able[
                choose([each.choice(one, self._config.cache.block_size) for each in able])
            ]
            engine.add(one)
            chosen.setdefault(engine.number, []).append(one)
        for number, its in chosen.items():
            # A death shows, and is dealt with, where outputs are taken.
            with suppress(EngineDeadError):
                self._engines[number].send(its)

    def finish(
        self, request_id: str, reason: FinishReason = "abort", index: int | None = None
    ) -> None:
        for engine in self._engines:
            if (one := engine.requests.get(request_id)) is None:
                continue
            if engine.client is not None:
                engine.client.finish(request_id, reason, index)
            if index is not None:
                before = one.num_tokens
                one.end(reason, index)
                engine.num_tokens += one.num_tokens - before
            if index is None or one.has_ended:
                engine.remove(one)
                if self._plugins.has_event_listeners:
                    engine.ending[request_id] = one, reason

    def reset_prefix_cache(self) -> None:
        self._check()
        for engine in self._engines:
            engine.forget_prefixes()
            if engine.client is not None:
                with suppress(ToolkitError):
                    engine.client.reset_prefix_cache()

    # Outputs

    def step(self, timeout: float | None = None) -> EngineOutputs:
        if not _has_any(self._news):
            self._check()
            self._take_from(self._polling.wait(math.inf if timeout is None else timeout) or ())
        return self._take_news()

    def poll_outputs(self) -> EngineOutputs:
        if not _has_any(self._news):
            self._check()
            self._take_from(self._engines)
        return self._take_news()

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

    def _take_news(self) -> EngineOutputs:
        news, self._news = self._news, EngineOutputs(time=self._news.time)
        return news

    def _take_from(self, engines: Collection[Engine]) -> None:
        """Takes in what engines have said, and buries those that have died."""
        for engine in list(engines):
            if (client := engine.client) is None:
                continue
            try:
                self._take(engine, client.step(0))
                # Now that its last words are taken in, it says that it is dead.
                self._take(engine, client.poll_outputs())
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

    def _take(self, engine: Engine, new: EngineOutputs) -> None:
        news = self._news
        news.time = max(news.time, new.time)
        news.admitted += new.admitted
        # Before the outputs, which may be the last of a request.
        news.events += [told for event in new.events if (told := _told(engine, event)) is not None]
        for output in new.outputs:
            if (one := engine.requests.get(output.request_id)) is None:
                continue
            before = one.num_tokens
            one.take(output)
            engine.num_tokens += one.num_tokens - before
            if one.has_ended:
                engine.remove(one)
            news.outputs.append(output)
        for request_id in new.missing or ():
            if (one := engine.requests.get(request_id)) is not None:
                self._send_again(engine, one)

    def _send_again(self, engine: Engine, one: InFlight) -> None:
        """With the data of its media, which its engine lacks: once."""
        try:
            if one.was_lacking:
                raise RequestError(
                    "the engine has lost the data of its images or other media, twice."
                )
            one.was_lacking = True
            engine.send([one])
        except RequestError as error:
            engine.remove(one)
            self._fail(one, str(error))

    def _fail(self, one: InFlight, error: str) -> None:
        request_id = one.request.request_id
        self._news.outputs += [
            EngineOutput(request_id=request_id, index=index, finish_reason="error", error=error)
            for index in one.unfinished
        ]

    # Engines come and go

    def _set_ready(self, engine: Engine, info: EngineInfo) -> None:
        engine.set_ready(info)
        first = next(one.info for one in self._engines if one.info is not None)
        if (device := info.config.device.device.partition(":")[0]) != (
            other := first.config.device.device.partition(":")[0]
        ):
            size = len(self._engines)
            raise ConfigError(
                f"it runs on {device}, and another on {other}: there are not {size} times as "
                "many GPUs as one engine needs."
            )
        infos = [one.info for one in self._engines if one.info is not None]
        if self._info is None and len(infos) == len(self._engines):
            # What fits one engine is to fit any.
            least = min(infos, key=lambda one: [pool.num_blocks for pool in one.kv_cache.pools])
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
            for one, reason in engine.ending.values()
            if (event := one.untold(reason)) is not None
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
        if all(one.client is None for one in self._engines):
            self._death = EngineDeadError(
                f"all {len(self._engines)} engines have died, the last of this: {error}"
            )
            self._death.__cause__ = error
            return
        self._move(left, error, had_started)

    def _move(self, left: Sequence[InFlight], error: ToolkitError, had_started: bool) -> None:
        """Has other engines go on with the requests of one that has died."""
        going_on = []
        for one in left:
            # Where it had not begun to serve, they cannot be what it died of.
            one.num_moves += had_started
            one.was_lacking = False
            if one.num_moves > self._max_moves:
                times = (
                    f"{one.num_moves} engines have died under the request (the most is "
                    f"data_parallel.max_moves, {self._max_moves})"
                )
                self._fail(one, f"{times}. The last: {error}")
            else:
                going_on.append(one)
        for one in going_on:
            try:
                self._send([one])
            except RequestError as refused:
                self._engines[one.engine].remove(one)
                self._fail(one, str(refused))


def _told(engine: Engine, event: Event) -> Event | None:
    """An engine's event as those who watch are to hear it."""
    told: Event | None = event
    if isinstance(event, RequestEvent):
        if event.kind in ("finished", "aborted"):
            engine.ending.pop(event.request_id, None)
        if (one := engine.requests.get(event.request_id)) is not None:
            told = one.told(event)
    return told if told is None or engine.number == 0 else replace(told, engine=engine.number)


def _empty(engine: Engine) -> LoadEvent:
    """What a dead engine has to do."""
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
