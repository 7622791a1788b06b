"""Changes of a model's state, each in a task: it is loaded, falls asleep, wakes up, or ends."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from typing import TYPE_CHECKING

from toolkit_lm.errors import CheckpointError
from toolkit_lm_server.errors import ApiError

from toolkit_lm_model_pool.model import PooledModel
from toolkit_lm_model_pool.need import as_size

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from toolkit_lm.engine import EngineProcess
    from toolkit_lm_server.keys import Keys
    from toolkit_lm_serving.budget import Shares

logger = logging.getLogger(__name__)


class Transitions:
    """Changes the states of models. Only the event loop uses it."""

    def __init__(self, budget: int, process: EngineProcess | None) -> None:
        """`budget`: bytes of all loaded models. `process`: one for the first engine."""
        self.memory: Shares | None = None
        """Memory of all requests. Set before the first load, as `keys` are."""
        self.keys: Keys | None = None
        self.process = process
        self.news = asyncio.Event()
        """Set when a state has changed."""
        self.closed = threading.Event()
        self._budget = budget
        self._tasks: set[asyncio.Task[None]] = set()

    def load(self, model: PooledModel) -> None:
        """Begins to load a model, or to wake it up."""
        model.state = "loading"
        model.began = time.monotonic()
        self._begin(self._wake_up(model) if model.sleep_level else self._load(model))

    def sleep(self, model: PooledModel, level: int) -> None:
        """Begins to put an idle model to sleep."""
        model.state = "unloading"
        model.falling = level
        self._begin(self._sleep(model, level))

    def end(self, model: PooledModel, failure: str | None = None) -> None:
        """Begins to unload a model. `failure`: the reason why its engine has died."""
        model.state = "unloading"
        self._begin(self._end(model, failure))

    async def finish(self) -> None:
        """Waits for all that has begun."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, model: PooledModel) -> None:
        assert self.memory is not None, "it is set before the first load"
        process, self.process = self.process, None
        try:
            if model.need is None:
                # The checkpoint may have come meanwhile.
                await asyncio.to_thread(model.prepare, self._budget)
                if model.need is None:
                    raise CheckpointError(model.reason)
                # Its place is found anew, for what it needs.
                self.process = process
                model.state = "cold"
                return
            await model.start(self.keys, self.memory, process)
            resident = await asyncio.to_thread(model.measure)
        except Exception as error:
            if self.closed.is_set():
                return
            logger.error("model %r failed to start: %s", model.name, error)
            model.wanted_since = None
            model.failed(error, time.monotonic())
            if model.entry.pin:
                model.wanted_since = time.monotonic()
            wake(model, failure_of(model, time.monotonic()))
        else:
            model.remember(resident, at_start=True)
            model.reason = ""
            logger.info(
                "model %r is ready after %.1f s, with %s",
                model.name,
                model.load_seconds,
                as_size(model.charge),
            )
            await self._ready(model)
        self.news.set()

    async def _wake_up(self, model: PooledModel) -> None:
        try:
            await model.wake_up()
        except Exception as error:
            if self.closed.is_set():
                return
            # Those who wait have it loaded anew.
            logger.warning("model %r does not wake up, and is unloaded: %s", model.name, error)
            model.state = "unloading"
            await self._end(model, None)
        else:
            logger.info("model %r is awake after %.2f s", model.name, model.wake_seconds)
            await self._ready(model)
        self.news.set()

    async def _ready(self, model: PooledModel) -> None:
        model.state = "ready"
        model.wanted_since = None
        model.keep_alive = model.settings.keep_alive
        model.ready_since = model.last_used = time.monotonic()
        if self.closed.is_set():
            await model.stop()
        wake(model)

    async def _sleep(self, model: PooledModel, level: int) -> None:
        try:
            await model.sleep(level)
        except Exception as error:
            if self.closed.is_set():
                return
            logger.warning("model %r cannot sleep, and is unloaded: %s", model.name, error)
            await self._end(model, None)
            return
        model.state = "asleep"
        model.falling = model.sleep_asked = 0
        model.leaving = False
        logger.info("model %r is asleep, with %s", model.name, as_size(model.holds))
        self.news.set()

    async def _end(self, model: PooledModel, failure: str | None) -> None:
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
        self.news.set()


def failure_of(model: PooledModel, now: float) -> ApiError:
    """The answer to a request for a model that has failed."""
    seconds = max(math.ceil(model.retry_at - now), 1)
    return ApiError(
        503,
        f"The model {model.name!r} has failed: {model.reason} It is started again in "
        f"{seconds} s at the earliest.",
        code="model_failed",
        headers={"Retry-After": str(seconds)},
    )


def wake(model: PooledModel, error: ApiError | None = None) -> None:
    """Wakes all requests that wait for a model."""
    for _, waiter in model.waiters:
        if waiter.done():
            continue
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)
