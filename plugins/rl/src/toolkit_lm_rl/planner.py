"""Engine half: pauses and sleeps, and changes the weights between two steps."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
from msgspec import Raw
from toolkit_lm.errors import RequestError, UnsupportedError
from toolkit_lm.executor import values_of
from toolkit_lm.kv import KVCacheConfig
from toolkit_lm.scheduler import Planner, Request
from toolkit_lm.step import worker_method

from toolkit_lm_rl.share import (
    PART,
    TAGS,
    Call,
    CallResult,
    Drop,
    Dropped,
    Pause,
    Sleep,
    State,
    Tag,
    Update,
    WakeUp,
)


class RlPlanner(Planner):
    """Controls the engine, by methods that `call_workers` calls as "rl.NAME"."""

    def __init__(self, config: Any, facts: Raw, *, options: Any) -> None:
        self._is_paused = False
        self._drains = False
        self._level = 0
        self._asleep: list[Tag] = []
        self._keeps_weights = False
        self._salt: str | None = None

    @worker_method
    def state(self) -> State:
        """Returns the engine's state."""
        return State(
            is_paused=self._is_paused or bool(self._asleep),
            level=self._level,
            asleep=self._asleep,
            weight_version=self.engine.weight_version,
            num_begun=sum(
                request.scheduled_time is not None
                for request in self.engine.scheduler.roster.requests.values()
            ),
            keeps_weights=self._keeps_weights and "weights" in self._asleep,
        )

    @worker_method
    def pause(self, pause: Pause) -> State:
        """Pauses the engine. With the mode "wait", running requests go on: the pause begins by a
        later call with the mode "keep"."""
        self._drains = pause.mode == "wait"
        self._is_paused = not self._drains
        if pause.mode == "abort":
            self._abort()
        return self._applied()

    @worker_method
    def resume(self) -> State:
        """Ends a pause."""
        self._is_paused = self._drains = False
        return self._applied()

    @worker_method
    def sleep(self, sleep: Sleep) -> State:
        """Gives memory back. Requests that are kept are computed again from their tokens."""
        if sleep.level not in (0, 1, 2):
            raise RequestError(f"level must be 0, 1 or 2, not {sleep.level}.", "level")
        if sleep.mode == "abort":
            self._abort()
        if sleep.level < self._level or (sleep.level and sleep.level == self._level):
            return self._applied()
        was_awake = not self._level
        self._asleep = ["scheduling"] if not sleep.level else [*TAGS]
        self._applied()
        if sleep.level:
            if was_awake:
                self.engine.start_over()
                self._init_kv_cache(self._smallest(self.engine.kv_cache))
            self._keeps_weights = self._drop(Drop(sleep.level, sleep.keep))
        self._level = sleep.level
        return self._applied()

    @worker_method
    def wake_up(self, wake_up: WakeUp) -> State:
        """Brings back what a sleep has given away: all of it, or what `tags` names."""
        tags = [*self._asleep] if wake_up.tags is None else wake_up.tags
        if "weights" in tags and "weights" in self._asleep:
            self._call("restore")
            self._asleep.remove("weights")
        if "kv_cache" in tags and "kv_cache" in self._asleep:
            self._init_kv_cache(self.engine.kv_cache)
            self._asleep.remove("kv_cache")
        if self._level and self._asleep == ["scheduling"]:
            # Graphs refer to memory that is elsewhere now.
            self.engine.executor.warm_up()
            tags = [*tags, "scheduling"]
        if "scheduling" in tags and self._asleep == ["scheduling"]:
            self._asleep = []
            self._level = 0
        return self._applied()

    @worker_method
    def change(self, update: Update) -> State:
        """Changes the weights to the staged ones. All keys and values are forgotten, and requests
        that are kept are computed again."""
        if "lora" in self.engine.scheduler.planners.by_name:
            raise UnsupportedError(
                "weights of an engine with adapters cannot change: some adapters are scaled by the "
                "weights that they were read for. Start the engine without lora.enabled."
            )
        self.engine.start_over()
        # Each rank checks its tensors before any rank changes a weight.
        self._call("prepare")
        self._call("apply")
        if "weights" in self._asleep:
            self._asleep.remove("weights")
        version = self._next() if update.version is None else update.version
        self.engine.weight_version = version
        if self._salt is None:
            self._salt = self.engine.scheduler.rules.salt
        # A version may come again with other weights.
        self.engine.start_over(f"{self._salt} {version} {secrets.token_hex(16)}")
        return self._applied()

    @worker_method
    def collective_rpc(self, call: Call) -> list[Any]:
        """Calls a method of the extension on all ranks. Weights that it gives to its model are
        changed afterwards, as `change` does. Returns the value of each rank."""
        try:
            found = [
                msgspec.msgpack.decode(raw, type=CallResult)
                for raw in self._call("call_extension", call)
            ]
        except BaseException:
            self._call("discard")
            raise
        if any(result.num_staged for result in found):
            self.change(Update())
        return [result.value for result in found]

    @worker_method
    def set_version(self, version: str) -> State:
        """Gives the present weights another name."""
        self.engine.weight_version = version
        return self.state()

    def _next(self) -> str:
        version = self.engine.weight_version
        return str(int(version) + 1) if version.isdecimal() else "1"

    def _abort(self) -> None:
        scheduler = self.engine.scheduler
        for request in [*scheduler.roster.requests.values()]:
            scheduler.outputs += scheduler.endings.end(request, "abort")

    def _applied(self) -> State:
        # A method that the scheduler always asks would cost each request something.
        asked = self.engine.scheduler.planners.may_begin
        asked[:] = [(name, ask) for name, ask in asked if name != PART]
        if self._drains:
            asked.append((PART, _only_begun))
        self.engine.scheduler.paused = self._is_paused or bool(self._asleep)
        return self.state()

    def _drop(self, drop: Drop) -> bool:
        """Has workers give up their weights. Returns whether all of them keep theirs in a file."""
        dropped = self._call("drop", drop)
        return all(msgspec.msgpack.decode(raw, type=Dropped).is_kept for raw in dropped)

    def _call(self, method: str, payload: object = None) -> list[Raw]:
        name = f"{PART}.{method}"
        called = self.engine.executor.call(name, Raw(msgspec.msgpack.encode(payload)))
        return values_of(name, called.result())

    def _init_kv_cache(self, kv_cache: KVCacheConfig) -> None:
        executor = self.engine.executor
        executor.init_kv_cache([kv_cache.of_layers(specs) for specs in executor.kv_cache_specs()])

    @staticmethod
    def _smallest(kv_cache: KVCacheConfig) -> KVCacheConfig:
        """A cache of one block in each pool."""
        return kv_cache.sized([1] * len(kv_cache.pools), [0] * len(kv_cache.pools))


def _only_begun(request: Request, tokens: object) -> str | None:
    """While the engine drains, only what has begun goes on."""
    return "paused" if request.scheduled_time is None else None
