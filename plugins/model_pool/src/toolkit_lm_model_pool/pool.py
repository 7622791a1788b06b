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

from toolkit_lm.errors import ConfigError
from toolkit_lm.frontend import Health
from toolkit_lm_server.errors import RETRY_AFTER, ApiError
from toolkit_lm_server.route import unless_disconnected

from toolkit_lm_model_pool.model import PooledModel
from toolkit_lm_model_pool.need import as_size
from toolkit_lm_model_pool.plan import make_plan
from toolkit_lm_model_pool.transitions import Transitions, failure_of, wake

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import Receive
    from toolkit_lm.engine import EngineProcess

logger = logging.getLogger(__name__)

_POLL = 0.1
"""Seconds from one look at the models to the next, where nothing happens."""
_LOOK = 1.0
"""Seconds from one look at the processes' memory to the next."""
_STANDING = ("ready", "asleep")
"""States of models that have a process and do not change."""
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
        self.ask_reload: Callable[[], object] = lambda: None
        """A function that has the models read anew, for SIGHUP."""
        self._turn = turn
        self._timeout = timeout
        self.transitions = Transitions(budget, process)
        self._news = self.transitions.news
        self._closed = self.transitions.closed
        self._tending: asyncio.Task[None] | None = None
        self._looked = 0.0
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
        await self.transitions.finish()
        await asyncio.gather(*(model.stop() for model in self._all))

    def close(self) -> None:
        """Ends all engines. May be called from any thread."""
        self._closed.set()
        if (process := self.transitions.process) is not None:
            process.end()
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
                raise failure_of(model, now)
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
        while model.falling:
            await asyncio.sleep(_POLL)
        if model.state in _STANDING:
            model.is_unwanted = model.leaving = True
            self._news.set()
        while model.is_unwanted or model.state == "unloading":
            await asyncio.sleep(_POLL)

    async def sleep(self, model: PooledModel, level: int) -> None:
        """Puts a model to sleep once its requests have ended. Those that come meanwhile wait, and
        wake it up. Raises ApiError (400) for one that cannot sleep so, or is not loaded."""
        if why := model.sleep_faults.get(level):
            raise ApiError(400, f"The model {model.name!r} cannot sleep: {why}", param="level")
        while model.state in ("loading", "unloading"):
            await asyncio.sleep(_POLL)
        if model.state not in _STANDING:
            raise ApiError(
                400,
                f"The model {model.name!r} is {model.state}: only a loaded model sleeps.",
                param="model",
            )
        num_sleeps = model.num_sleeps
        if model.sleep_level < level:
            model.sleep_asked = level
            model.leaving = True
            self._news.set()
            while model.sleep_asked and model.num_sleeps == num_sleeps:
                await asyncio.sleep(_POLL)
            if model.num_sleeps == num_sleeps:
                raise ApiError(503, f"The model {model.name!r} did not fall asleep: see the log.")

    def reset(self, model: PooledModel) -> None:
        """Has a model loaded or woken up, whoever asks for it, and forgets when it last failed."""
        model.retry_at = 0.0
        if model.state in ("cold", "failed", "asleep"):
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
            wake(old)
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
            wake(model, ApiError(503, "The server is being stopped.", code="server_stopping"))

    def _step(self, now: float) -> None:
        """Does what is to be done now."""
        for model in self._all:
            if model.state in _STANDING and model.engine is not None:
                self._settle(model, model.engine.health(), now)
        self._old = [model for model in self._old if model.state not in ("cold", "failed")]
        plan = make_plan(self._all, self.budget, self._turn, now)
        for model in self._all:
            left = model.leaving
            model.leaving = bool(model.is_unwanted or model.sleep_asked) or any(
                model is other for other in plan.leave
            )
            if left and not model.leaving and model.state == "ready":
                wake(model)
        for model in plan.sleep:
            self.transitions.sleep(model, model.entry.sleep_level)
        for model in plan.evict:
            model.num_evictions += 1
            self.transitions.end(model)
        for model in plan.load:
            self.transitions.load(model)

    def _settle(self, model: PooledModel, health: Health, now: float) -> None:
        """Ends a loaded model that has died, or is not wanted any more, or puts it to sleep."""
        if health.status == "dead":
            logger.error("model %r has died: %s", model.name, health.reason)
            self.transitions.end(model, failure=health.reason)
        elif model.state == "asleep":
            if model.dropped or model.is_unwanted:
                self.transitions.end(model)
            elif model.sleep_asked > model.sleep_level:
                self.transitions.sleep(model, model.sleep_asked)
        elif model.is_idle:
            if model.dropped or model.is_unwanted:
                self.transitions.end(model)
            elif model.sleep_asked:
                self.transitions.sleep(model, model.sleep_asked)
            elif self._is_over(model, now):
                if model.entry.idle == "sleep":
                    self.transitions.sleep(model, model.entry.sleep_level)
                else:
                    self.transitions.end(model)

    @staticmethod
    def _is_over(model: PooledModel, now: float) -> bool:
        """Whether an idle model has been idle for as long as it may."""
        if model.entry.pin or model.keep_alive is None:
            return False
        return now - max(model.last_used, model.ready_since) >= model.keep_alive

    async def _look(self, now: float) -> None:
        """Measures the models that have processes, from time to time."""
        if now - self._looked < _LOOK:
            return
        self._looked = now
        states = (*_STANDING, "loading")
        for model in [model for model in self._all if model.state in states]:
            state = model.state
            resident = await asyncio.to_thread(model.measure)
            if model.state == state:
                model.remember(resident)
