"""The pool: models that share a memory budget, and the requests that wait for them."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from toolkit_lm.errors import CheckpointError, ConfigError
from toolkit_lm.frontend import Health
from toolkit_lm_server.errors import RETRY_AFTER, ApiError
from toolkit_lm_server.route import unless_disconnected

from toolkit_lm_model_pool.model import PooledModel
from toolkit_lm_model_pool.need import as_size
from toolkit_lm_model_pool.plan import make_plan

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from fastapi import FastAPI
    from starlette.types import Receive
    from toolkit_lm.engine import EngineProcess
    from toolkit_lm_server.keys import Keys
    from toolkit_lm_serving.budget import Shares

logger = logging.getLogger(__name__)

_POLL = 0.1
"""Seconds from one look at the models to the next, where nothing happens."""
_LOOK = 1.0
"""Seconds from one look at the processes' memory to the next."""
_SOON = 2.0
"""Seconds for which a request waits for the next start of a model that has failed."""


class Pool:
    """Models under one budget. It stands in for the engine of a server (Servable).

    Only the event loop uses it, except for its constructor and `close`.
    """

    num_restarts = 0
    num_queued_tokens = 0
    error: BaseException | None = None

    def __init__(
        self,
        models: Sequence[PooledModel],
        budget: int,
        *,
        turn: float,
        timeout: float,
        process: EngineProcess | None = None,
    ) -> None:
        """Reads the models' configs. `budget`: bytes of all loaded models. `turn`: seconds that a
        loaded model keeps its place. `timeout`: seconds that a request waits. `process`: one for
        the first engine.

        Raises ConfigError for a model that does not fit alone and is not optional.
        """
        self.budget = budget
        self.models = {model.name: model for model in models}
        self._old: list[PooledModel] = []
        """Models that no entry names any more, until they are idle."""
        self.memory: Shares | None = None
        """Memory of all requests. Set before the first load, as `keys` are."""
        self.keys: Keys | None = None
        self.ask_reload: Callable[[], object] = lambda: None
        """A function that has the models read anew, for SIGHUP."""
        self._turn = turn
        self._timeout = timeout
        self._process = process
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._tending: asyncio.Task[None] | None = None
        self._looked = 0.0
        self._closed = threading.Event()
        self.check(models)

    def check(self, models: Sequence[PooledModel]) -> None:
        """Reads the configs of models that are to share the budget. May be called from any thread.

        Raises ConfigError for one that does not fit alone and is not optional, and where the pinned
        do not fit together.
        """
        now = time.monotonic()
        for model in models:
            model.prepare(self.budget)
            if model.need is None:
                logger.warning("model %r cannot be read: %s", model.name, model.reason)
                model.failed(model.reason, now)
            elif (why := self._too_large(model)) and not model.entry.optional:
                raise ConfigError(
                    f"models_memory: {why} Raise it, give the model fewer num_kv_blocks, or make "
                    "it optional."
                )
            if model.entry.pin or model.entry.warm:
                model.wanted_since = now
        pinned = [model for model in models if model.entry.pin]
        if (total := sum(model.charge for model in pinned)) > self.budget:
            names = ", ".join(repr(model.name) for model in pinned)
            raise ConfigError(
                f"models_memory: the pinned models {names} need {as_size(total)} together, and "
                f"the budget is {as_size(self.budget)}."
            )

    def _too_large(self, model: PooledModel) -> str:
        """Reason why a model can never be loaded. "": it can."""
        if model.charge <= self.budget:
            return ""
        need = model.need
        parts = (
            ""
            if need is None
            else (
                f" (weights {as_size(need.weights)}, KV cache {as_size(need.kv_cache)}, workspace "
                f"{as_size(need.workspace)}, process {as_size(need.process)})"
            )
        )
        return (
            f"the model {model.name!r} needs {as_size(model.charge)}{parts}, and the budget is "
            f"{as_size(self.budget)}."
        )

    # The parts of a server's engine

    @property
    def served_model_name(self) -> str:
        names = list(self.models)
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        return f"{len(names)} models ({shown})"

    def health(self) -> Health:
        """Ready: models that are not loaded, or have failed, are told by themselves."""
        return Health("dead" if self._closed.is_set() else "ready", "")

    async def wait_ready(self) -> None:
        """Begins to load models. Requests need not wait for all of them."""
        self._tending = asyncio.create_task(self._tend())

    async def stop(self) -> None:
        """Ends all engines, with their routes."""
        self._closed.set()
        self._news.set()
        if self._tending is not None:
            await self._tending
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(model.stop() for model in self._all))

    def close(self) -> None:
        """Ends all engines. May be called from any thread."""
        self._closed.set()
        if self._process is not None:
            self._process.end()
        threads = [threading.Thread(target=model.close, daemon=True) for model in self._all]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    # Requests

    @asynccontextmanager
    async def use(self, model: PooledModel, receive: Receive) -> AsyncIterator[FastAPI]:
        """The routes of a model, once it is loaded. It stays loaded until the end of the `with`
        block. `receive`: tells whether the client leaves while it waits; the body has been read.

        Raises ApiError (503) for one that has failed, or is not loaded in time. Raises
        ClientDisconnect.
        """
        is_held = False

        async def acquire() -> None:
            nonlocal is_held
            await self.loaded(model)
            # Nothing runs between the check and this.
            is_held = True
            model.in_flight += 1
            model.used(time.monotonic())

        try:
            await unless_disconnected(receive, acquire())
            assert model.app is not None, "it is ready"
            yield model.app
        finally:
            if is_held:
                model.in_flight -= 1
                model.last_used = time.monotonic()
                model.succeeded()
                self._news.set()

    async def loaded(self, model: PooledModel) -> None:
        """Waits until a model is ready. Raises ApiError (503)."""
        start = time.monotonic()
        deadline = start + self._timeout
        while model.state != "ready" or model.leaving:
            now = time.monotonic()
            if self._closed.is_set():
                raise ApiError(503, "The server is being stopped.", code="server_stopping")
            if model.dropped:
                raise ApiError(404, f"The model {model.name!r} is served no more.", param="model")
            if why := self._too_large(model):
                raise ApiError(503, f"This cannot be loaded: {why}", code="model_too_large")
            if model.state == "failed" and model.retry_at - now > _SOON:
                raise self._failure(model, now)
            if now >= deadline:
                raise self._late(model)
            waiter = asyncio.get_running_loop().create_future()
            entry = (start, waiter)
            model.waiters.append(entry)
            self._news.set()
            try:
                await asyncio.wait_for(waiter, deadline - now)
            except TimeoutError:
                continue
            finally:
                with suppress(ValueError):
                    model.waiters.remove(entry)
                model.wait_seconds += time.monotonic() - now

    def _failure(self, model: PooledModel, now: float) -> ApiError:
        seconds = max(math.ceil(model.retry_at - now), 1)
        return ApiError(
            503,
            f"The model {model.name!r} has failed: {model.reason} It is started again in "
            f"{seconds} s at the earliest.",
            code="model_failed",
            headers={"Retry-After": str(seconds)},
        )

    def _late(self, model: PooledModel) -> ApiError:
        free = self.budget - sum(other.holds for other in self._all)
        busy = [
            f"{other.name!r} ({other.state}, {as_size(other.holds)})"
            for other in self._all
            if other.holds and other is not model
        ]
        others = f" Beside it: {', '.join(busy[:8])}." if busy else ""
        return ApiError(
            503,
            f"The model {model.name!r} was not loaded within {self._timeout:g} s "
            f"(models_timeout). It needs {as_size(model.charge)}, and {as_size(max(free, 0))} of "
            f"{as_size(self.budget)} are free.{others}",
            code="model_loading",
            headers={"Retry-After": str(math.ceil(model.load_seconds) or RETRY_AFTER)},
        )

    async def unload(self, model: PooledModel) -> None:
        """Unloads a model once its requests have ended. Those that come meanwhile wait, and have it
        loaded again."""
        model.wanted_since = None
        while model.state == "loading":
            await asyncio.sleep(_POLL)
        if model.state == "ready":
            model.is_unwanted = model.leaving = True
            self._news.set()
        while model.is_unwanted or model.state == "unloading":
            await asyncio.sleep(_POLL)

    def reset(self, model: PooledModel) -> None:
        """Has a model loaded, whoever asks for it, and forgets when it last failed."""
        model.retry_at = 0.0
        if model.state in ("cold", "failed"):
            model.wanted_since = time.monotonic()
        self._news.set()

    def replace(self, models: Sequence[PooledModel]) -> tuple[list[str], list[str], list[str]]:
        """Takes new entries in: models with the same entry and options stay as they are. Others end
        when their requests have. Returns names: added, changed, removed.

        The new ones have been prepared.
        """
        entries = {model.name: model for model in models}
        added = [name for name in entries if name not in self.models]
        removed = [name for name in self.models if name not in entries]
        changed = [
            name
            for name, model in entries.items()
            if name in self.models
            and (self.models[name].entry, self.models[name].settings)
            != (model.entry, model.settings)
        ]
        for name in (*changed, *removed):
            old = self.models.pop(name)
            old.dropped = True
            self._old.append(old)
            _wake(old)
        self.models = {name: self.models.get(name, model) for name, model in entries.items()}
        self._news.set()
        return added, changed, removed

    # Tending

    @property
    def _all(self) -> list[PooledModel]:
        return [*self.models.values(), *self._old]

    async def _tend(self) -> None:
        while not self._closed.is_set():
            self._news.clear()
            try:
                self._step(time.monotonic())
                await self._look(time.monotonic())
            except Exception:
                logger.exception("the pool of models failed at a step")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), _POLL)
        for model in self._all:
            _wake(model, ApiError(503, "The server is being stopped.", code="server_stopping"))

    def _step(self, now: float) -> None:
        """Does what is to be done now."""
        for model in self._all:
            if model.state == "ready" and model.engine is not None:
                health = model.engine.health()
                if health.status == "dead":
                    logger.error("model %r has died: %s", model.name, health.reason)
                    self._begin(model, self._end(model, failure=health.reason))
                elif model.is_idle and self._is_over(model, now):
                    self._begin(model, self._end(model))
        self._old = [model for model in self._old if model.state not in ("cold", "failed")]
        plan = make_plan(self._all, self.budget, self._turn, now)
        for model in self._all:
            left = model.leaving
            model.leaving = model.is_unwanted or any(model is other for other in plan.leave)
            if left and not model.leaving and model.state == "ready":
                _wake(model)
        for model in plan.evict:
            model.num_evictions += 1
            self._begin(model, self._end(model))
        for model in plan.load:
            model.state = "loading"
            self._begin(model, self._load(model))

    @staticmethod
    def _is_over(model: PooledModel, now: float) -> bool:
        """Whether an idle model has been idle for as long as it may."""
        if model.dropped or model.is_unwanted:
            return True
        if model.entry.pin or model.keep_alive is None:
            return False
        return now - max(model.last_used, model.ready_since) >= model.keep_alive

    def _begin(self, model: PooledModel, work: Coroutine[None, None, None]) -> None:
        if model.state == "ready":
            model.state = "unloading"
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, model: PooledModel) -> None:
        assert self.memory is not None, "it is set before the first load"
        process, self._process = self._process, None
        try:
            if model.need is None:
                # The checkpoint may have come meanwhile.
                await asyncio.to_thread(model.prepare, self.budget)
                if model.need is None:
                    raise CheckpointError(model.reason)
                # Its place is found anew, for what it needs.
                self._process = process
                model.state = "cold"
                return
            await model.start(self.keys, self.memory, process)
            resident = await asyncio.to_thread(model.measure)
        except Exception as error:
            if self._closed.is_set():
                return
            logger.error("model %r failed to start: %s", model.name, error)
            model.wanted_since = None
            model.failed(error, time.monotonic())
            if model.entry.pin:
                model.wanted_since = time.monotonic()
            _wake(model, self._failure(model, time.monotonic()))
        else:
            model.remember(resident, at_start=True)
            model.state = "ready"
            model.reason = ""
            model.wanted_since = None
            model.keep_alive = model.settings.keep_alive
            model.ready_since = model.last_used = time.monotonic()
            logger.info(
                "model %r is ready after %.1f s, with %s",
                model.name,
                model.load_seconds,
                as_size(model.charge),
            )
            if self._closed.is_set():
                await model.stop()
            _wake(model)
        self._news.set()

    async def _end(self, model: PooledModel, failure: str | None = None) -> None:
        try:
            await model.stop()
        except Exception:
            logger.exception("model %r did not end well", model.name)
        model.leaving = model.is_unwanted = False
        if failure is None:
            model.state = "cold"
            logger.info("model %r is unloaded", model.name)
        else:
            model.failed(failure, time.monotonic())
            if model.entry.pin:
                model.wanted_since = time.monotonic()
        self._news.set()

    async def _look(self, now: float) -> None:
        """Measures the loaded models from time to time."""
        if now - self._looked < _LOOK:
            return
        self._looked = now
        for model in [model for model in self._all if model.state == "ready"]:
            resident = await asyncio.to_thread(model.measure)
            if model.state == "ready":
                model.remember(resident)


def _wake(model: PooledModel, error: ApiError | None = None) -> None:
    """Wakes all requests that wait for a model."""
    for _, waiter in model.waiters:
        if waiter.done():
            continue
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)
