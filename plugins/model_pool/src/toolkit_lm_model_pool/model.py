"""One model of a pool: its engine and its routes while it is loaded, and what is known of it."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import deque
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from toolkit_lm.config import VllmConfig, options_of
from toolkit_lm.errors import ConfigError, ToolkitError, nearest
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution import resolve_configured
from toolkit_lm_server.health import Readiness
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.plugin_routes import check_names
from toolkit_lm_server.threads import in_thread

from toolkit_lm_model_pool.adapters import Adapters
from toolkit_lm_model_pool.durations import parse_seconds
from toolkit_lm_model_pool.need import Need, memory_of, need_of

if TYPE_CHECKING:
    from fastapi import FastAPI
    from toolkit_lm import AsyncLLM
    from toolkit_lm.engine import EngineProcess
    from toolkit_lm_server.keys import Keys
    from toolkit_lm_serving.budget import Shares

    from toolkit_lm_model_pool.entries import Entry

logger = logging.getLogger(__name__)

State = Literal["cold", "loading", "ready", "asleep", "unloading", "failed"]
_OF_SERVER = ("tool_call_parser", "reasoning_parser", "routes", "tokenizer_info")
"""Options of the server that an entry may state for its model."""
_HALF_LIFE = 60.0
"""Seconds after which a use counts half."""
_FIRST_BACKOFF = 0.5
_MOST_BACKOFF = 60.0
"""Most seconds from a failure to the next start, as `_FIRST_BACKOFF` is from the first failure."""


class Settings(msgspec.Struct, frozen=True):
    """The options of one model."""

    config: VllmConfig
    server: ServerOptions
    keep_alive: float | None
    """Seconds after which the idle model is unloaded. None: it stays."""


def settings_of(
    entry: Entry, config: VllmConfig, server: ServerOptions, keep_alive: float | None
) -> Settings:
    """The options of an entry, over those of the command line. Raises ConfigError, which names the
    entry."""
    own = {o.name: o for o in options_of(ServerOptions) if o.name in _OF_SERVER}
    engine = {o.name for o in VllmConfig.options()} - {"model", "served_model_name"}
    changed: dict[str, Any] = {}
    of_server: dict[str, Any] = {}
    try:
        for key, value in entry.options.items():
            name = str(key).replace("-", "_")
            if name in own:
                of_server[name] = own[name].convert(value, name)
            elif name in engine:
                changed[name] = value
            else:
                raise ConfigError(f"unknown option {name!r}. {nearest(name, {*own, *engine})}")
        if changed.get("engine_process") is False:
            raise ConfigError("engine_process must be on: each model has a process of its own.")
        names = [entry.name, *entry.aliases]
        made = config.replace(**changed).replace(
            model=entry.checkpoint or entry.name, served_model_name=names, engine_process=True
        )
        if entry.adapters:
            of_plugins = _with_adapters(made.plugins.plugin_option, entry.adapters)
            made = made.replace(plugin_option=of_plugins)
        if made.scheduler.scheduling_policy is None:
            made = made.replace(scheduling_policy="fair")
        options = msgspec.structs.replace(server, **of_server)
    except ConfigError as error:
        raise ConfigError(f"model {entry.name!r}: {error}") from error
    own_time = keep_alive if entry.keep_alive is None else parse_seconds(entry.keep_alive)
    return Settings(made, options, own_time)


def _with_adapters(
    options: Mapping[str, Mapping[str, Any]], adapters: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Options of plugins by plugin, with adapters for the plugin lora. Raises ConfigError."""
    lora = options.get("lora", {})
    if lora.get("modules"):
        raise ConfigError(
            "the entry's adapters and the option modules of the plugin lora both list adapters. "
            "State all of them in one of the two."
        )
    modules = [f"{name}={path}" for name, path in adapters.items()]
    others = {name: dict(values) for name, values in options.items()}
    return {**others, "lora": {**lora, "enabled": True, "modules": modules}}


def _sleep_faults(plugins: Plugins) -> dict[int, str]:
    """Reasons why an engine with these plugins cannot sleep, by level."""
    loaded = {info.name for info in plugins.infos if info.status == "ok"}
    if "rl" not in loaded:
        return dict.fromkeys((1, 2), "the plugin rl, which does it, is not loaded.")
    lora = plugins.options("lora") if "lora" in loaded else None
    if lora is not None and (lora.enabled or lora.modules or lora.folder is not None):
        return {
            2: "an engine with adapters keeps its weights. Use sleep_level 1, which gives up the "
            "KV cache."
        }
    return {}


class PooledModel:
    """A model of a pool. Only the event loop uses it, except for `prepare` and `close`."""

    def __init__(self, entry: Entry, settings: Settings) -> None:
        self.entry = entry
        self.settings = settings
        self.state: State = "cold"
        self.reason = ""
        """Reason of a failure."""
        self.resolved: VllmConfig | None = None
        self.need: Need | None = None
        """Estimate of the memory. None: the checkpoint could not be read."""
        self.measured = 0
        """Most bytes that its processes were seen to take, and may take: 0 before the first
        load."""
        self.resident = 0
        """Bytes at the last look."""
        self.app: FastAPI | None = None
        self.metrics: Metrics | None = None
        self.engine: AsyncLLM | None = None
        self.in_flight = 0
        self.waiters: deque[tuple[float, asyncio.Future[None]]] = deque()
        """Requests that wait for the model, with the time of their arrival."""
        self.wanted_since: float | None = None
        """Time from which the model is to be loaded without a request. None: it is not."""
        self.leaving = False
        """New requests wait: another model is to have the place."""
        self.is_unwanted = False
        """An operator has it unloaded."""
        self.sleep_asked = 0
        """Level at which an operator has it sleep. 0: nobody does."""
        self.falling = 0
        """Level of the sleep into which it falls. 0: it does not."""
        self.sleep_level = 0
        """Level at which it sleeps, until it is awake. 0: it does not."""
        self.keeps_weights = False
        """Asleep, its weights are in a file, as they were in memory."""
        self._asleep: dict[int, int] = {}
        """Bytes that it took asleep, by level."""
        self.wake_seconds = 0.0
        self.sleep_faults: dict[int, str] = {}
        """Reasons why it cannot sleep, by level."""
        self.dropped = False
        """No entry names it any more."""
        self.keep_alive = settings.keep_alive
        self.ready_since = self.last_used = 0.0
        self.began = 0.0
        """Time at which the last load or waking up began."""
        self.load_seconds = 0.0
        self.wait_seconds = 0.0
        """Seconds that requests have waited for it, altogether."""
        self.num_loads = self.num_evictions = self.num_failures = self.num_sleeps = 0
        self.retry_at = 0.0
        self._failed_in_row = 0
        self._uses = 0.0
        self._uses_at = 0.0
        self._stack = AsyncExitStack()
        self._adapters = Adapters(entry.adapters)

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def adapters(self) -> Mapping[str, str]:
        """Folders of its adapters by name, with those that were loaded since its start."""
        return self._adapters.folders(self._running)

    @property
    def _running(self) -> AsyncLLM | None:
        """The engine, once it has been ready."""
        return None if self.app is None else self.engine

    @property
    def charge(self) -> int:
        """Bytes of the budget that the model takes, or would take."""
        return self.measured or (0 if self.need is None else self.need.total)

    @property
    def most(self) -> int:
        """Bytes of the budget that it takes from the start of a load or a waking up. Weights that
        come from the checkpoint are there twice for a moment: read anew, and put into their
        place."""
        if self.sleep_level < 2 or self.keeps_weights or self.need is None:
            return self.charge
        return self.charge + self.need.weights

    def resting(self, level: int) -> int:
        """Bytes that it takes asleep: as seen in its last sleep at this level, else estimated."""
        if level in self._asleep:
            return self._asleep[level]
        if self.need is None:
            return 0
        keeps = level == 1 and self._is_on_cpu
        return min(self.charge, self.need.process + (self.need.weights if keeps else 0))

    @property
    def holds(self) -> int:
        """Bytes of the budget that it takes now."""
        if self.state == "loading":
            return self.most
        if self.sleep_level:
            return self.resting(self.sleep_level)
        return self.charge if self.state in ("ready", "unloading") else 0

    @property
    def coming(self) -> int:
        """Bytes of the budget that it is about to give back."""
        if self.state != "unloading":
            return 0
        return self.holds - (self.resting(self.falling) if self.falling else 0)

    @property
    def is_idle(self) -> bool:
        """Whether it could be unloaded at once."""
        free = self.state == "ready" and self.in_flight == 0
        return free and (self.leaving or not self.waiters)

    @property
    def since(self) -> float | None:
        """Time from which somebody waits for the model. None: nobody does."""
        times = [time for time in (self.wanted_since,) if time is not None]
        return min([*times, self.waiters[0][0]] if self.waiters else times, default=None)

    def progress(self, now: float) -> int | None:
        """Share of a load or a waking up that is done, in percent: by the time that the last one
        took, else by the memory that it has taken so far. None: there is no load."""
        if self.state != "loading":
            return None
        if seconds := self.wake_seconds if self.sleep_level else self.load_seconds:
            share = (now - self.began) / seconds
        elif self.need is not None:
            share = self.resident / (self.need.process + self.need.weights)
        else:
            share = 0.0
        return min(int(100 * share), 99)

    def used(self, now: float) -> None:
        """Counts a use."""
        self._uses = self._rate(now) + 1
        self._uses_at = now

    def worth(self, now: float) -> float:
        """Worth of keeping the model: seconds of a reload x rate of use."""
        return self.load_seconds * self._rate(now)

    def sleep_worth(self, now: float) -> float:
        """Worth of keeping the model awake: seconds of waking up x rate of use."""
        return (self.wake_seconds or self.load_seconds / 10) * self._rate(now)

    def _rate(self, now: float) -> float:
        return float(self._uses * 0.5 ** ((now - self._uses_at) / _HALF_LIFE))

    def prepare(self, budget: int) -> None:
        """Reads the checkpoint's config and headers, and estimates the memory. A checkpoint that
        cannot be read is a failure of this model. May be called from any thread.

        Raises ConfigError for routes that there are not, and for a sleep that is not possible.
        """
        config = self.settings.config
        plugins = Plugins.load(config.plugins)
        check_names(plugins, self.settings.server.routes)
        self.sleep_faults = _sleep_faults(plugins)
        if self.entry.idle == "sleep" and (why := self.sleep_faults.get(self.entry.sleep_level)):
            raise ConfigError(f"model {self.name!r} cannot have idle: sleep: {why}")
        try:
            self.resolved = resolve_configured(plugins.configure(config), plugins)
        except ToolkitError as error:
            self.reason = str(error)
            return
        finally:
            plugins.close()
        self.need = need_of(self.resolved, budget)

    async def start(
        self, keys: Keys | None, memory: Shares, process: EngineProcess | None = None
    ) -> None:
        """Starts the engine, waits until it is ready, and makes its routes. Raises the error that
        keeps it from that; nothing is left then."""
        started = time.monotonic()
        self._stack = AsyncExitStack()
        try:
            await self._started(keys, memory, process)
        except BaseException:
            await self.stop()
            raise
        self.load_seconds = time.monotonic() - started
        self.num_loads += 1

    async def _started(
        self, keys: Keys | None, memory: Shares, process: EngineProcess | None
    ) -> None:
        metrics = Metrics(model_name=self.name)
        config = self._sized()

        def make() -> AsyncLLM:
            from toolkit_lm import AsyncLLM

            plugins = Plugins.load(config.plugins)
            plugins.add_listener(metrics.name, metrics.toolkit_event)
            return AsyncLLM(config, plugins=plugins, wait=False, process=process)

        def make_app(engine: AsyncLLM) -> FastAPI:
            from toolkit_lm_server.app import create_app

            options = self.settings.server
            readiness = Readiness(engine)
            made = create_app(
                engine,
                options,
                metrics=metrics,
                readiness=readiness,
                keys=keys,
                memory=memory,
            )
            self._adapters.restore(engine)
            return made

        engine = self.engine = await asyncio.wrap_future(in_thread(make))
        app = await asyncio.wrap_future(in_thread(lambda: make_app(engine)))
        await self._stack.enter_async_context(app.router.lifespan_context(app))
        await engine.wait_ready()
        self.metrics = metrics
        self.app = app

    def _sized(self) -> VllmConfig:
        """The config, with the size of the KV cache that the budget counts."""
        config = self.settings.config
        cache = config.cache
        if self.need is None or not self.need.kv_cache or cache.num_kv_blocks is not None:
            return config
        return config.replace(kv_cache_memory=str(self.need.kv_cache // self.need.num_caches))

    async def stop(self) -> None:
        """Ends the engine, and forgets its routes."""
        engine = self.engine
        self._adapters.remember(self._running)
        self.app = self.metrics = None
        try:
            await self._stack.aclose()
        except Exception:
            logger.exception("model %r: its routes did not end well", self.name)
        self.engine = None
        self.resident = 0
        if engine is not None:
            await asyncio.wrap_future(in_thread(engine.close))
            del engine
            await asyncio.to_thread(gc.collect)
        self.falling = self.sleep_level = self.sleep_asked = 0

    async def sleep(self, level: int) -> None:
        """Has the engine give up its KV cache (1), or the weights, too (2). Its process stays."""
        from toolkit_lm_rl.control import AsyncControl

        assert self.engine is not None, "it is loaded"
        self.keeps_weights = await AsyncControl(self.engine).sleep(level, keep=True)
        self.resident = await asyncio.to_thread(self.measure)
        if self._is_on_cpu and self.resident:
            self._asleep[level] = self.resident
        self.sleep_level = level
        self.num_sleeps += 1

    async def wake_up(self) -> None:
        """Brings back what the engine gave up."""
        from toolkit_lm_rl.control import AsyncControl

        assert self.engine is not None, "its process has stayed"
        started = time.monotonic()
        await AsyncControl(self.engine).wake_up()
        self.sleep_level = 0
        self.wake_seconds = time.monotonic() - started

    def close(self) -> None:
        """Ends the engine. May be called from any thread."""
        if (engine := self.engine) is not None:
            with suppress(Exception):
                engine.close()

    def failed(self, error: object, now: float) -> None:
        """Records a failure, and when the next start may be."""
        self.state = "failed"
        self.reason = str(error) or type(error).__name__
        self.num_failures += 1
        wait = min(_FIRST_BACKOFF * 2**self._failed_in_row, _MOST_BACKOFF)
        self._failed_in_row = min(self._failed_in_row + 1, 10)
        self.retry_at = now + wait

    def succeeded(self) -> None:
        """Forgets earlier failures: an answer has been given."""
        self._failed_in_row = 0

    @property
    def pids(self) -> list[int]:
        """Processes of the engine."""
        engine: Any = self.engine
        if engine is None:
            return []
        several = [state.pid for state in engine.engines]
        client = getattr(getattr(engine, "engine", None), "client", None)
        own = getattr(getattr(client, "process", None), "pid", None)
        return [pid for pid in several or [own] if pid]

    def measure(self) -> int:
        """Bytes that its processes take now. It takes some milliseconds: not for the event
        loop."""
        return memory_of(self.pids)

    def remember(self, resident: int, *, at_start: bool = False) -> None:
        """Takes in what was measured. At the start no page of the KV cache may have been touched
        yet: it counts besides."""
        self.resident = resident
        is_loading = self.state == "loading" and not at_start
        if not self._is_on_cpu or not resident or is_loading:
            return
        if self.sleep_level:
            self._asleep[self.sleep_level] = resident
            return
        engine = self.engine
        lazy = 0
        if at_start and engine is not None:
            pools = engine.processor.limits.kv_cache.pools
            lazy = sum(pool.block_bytes * pool.num_blocks for pool in pools)
            lazy *= 1 if self.need is None else self.need.num_caches
            self.measured = 0
        self.measured = max(self.measured, resident + lazy)

    @property
    def _is_on_cpu(self) -> bool:
        return self.settings.config.device.device in ("auto", "cpu")

    def facts(self) -> Mapping[str, Any]:
        """State and figures, for people and clients."""
        return {
            "state": self.state,
            "reason": self.reason or None,
            "progress": self.progress(time.monotonic()),
            "bytes_needed": self.charge or None,
            "bytes_resident": self.resident,
            "requests_in_flight": self.in_flight,
            "requests_waiting": len(self.waiters),
            "loads": self.num_loads,
            "evictions": self.num_evictions,
            "sleeps": self.num_sleeps,
            "sleep_level": self.sleep_level or None,
            "failures": self.num_failures,
            "pinned": self.entry.pin,
        }
