"""In the scheduler: which adapter has which slot of the workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Raw, msgpack
from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import TokenRange
from toolkit_lm.messages import StepPlan
from toolkit_lm.scheduler import Planner, Request


class LoraPlanner(Planner):
    """Tells workers (slot, digest) of what to put into slots, and hears which adapters there are,
    and which have theirs. Of the slots that nobody uses, the longest unused goes first."""

    def __init__(self, config: VllmConfig, facts: Raw, *, options: Any) -> None:
        self.num_slots = options.num_slots
        self.available: set[str] = set()
        """Digests of the adapters that an app has loaded."""
        self.gone: set[str] = set()
        """Digests of those that were unloaded, or loaded anew with other contents."""
        self.slots: dict[str, int] = {}
        """By digest, in the order of last use."""
        self.loaded: set[str] = set()
        self.users: dict[str, str] = {}
        """By request that runs, its digest."""
        self.waiting: set[str] = set()
        """Requests whose adapter is not loaded."""
        self.to_load: list[tuple[int, str]] = []
        self.asks = False
        """An answer may have been lost."""
        self.update(facts)

    def may_begin(self, request: Request, tokens: TokenRange) -> str | None:
        if (raw := request.inputs.parts.get("like")) is None:
            return None
        name, digest = msgpack.decode(raw)
        if digest in self.gone:
            raise ValueError(f"adapter {name!r} was unloaded, or has other contents now")
        if digest not in self.available:
            self.waiting.add(request.request_id)
            return f"{name} is not loaded yet"
        if digest in self.slots:
            return None if digest in self.loaded else "is loading"
        if (slot := self._free_slot()) is None:
            return "no slot"
        self.slots[digest] = slot
        self.to_load.append((slot, digest))
        return "is loading"

    def _free_slot(self) -> int | None:
        free = set(range(1, self.num_slots + 1)) - set(self.slots.values())
        if free:
            return min(free)
        held = set(self.users.values())
        unused = [one for one in self.slots if one in self.loaded and one not in held]
        if not unused:
            return None
        self.loaded.remove(unused[0])
        return self.slots.pop(unused[0])

    def begin(self, plan: StepPlan, request: Request) -> None:
        if (raw := request.inputs.parts.get("like")) is not None:
            _, digest = msgpack.decode(raw)
            self.users[request.request_id] = digest
            self.waiting.discard(request.request_id)
            self.slots[digest] = self.slots.pop(digest)

    def release(self, request_id: str) -> None:
        self.users.pop(request_id, None)
        self.waiting.discard(request_id)

    def end_step(self) -> Raw | None:
        to_load, self.to_load = self.to_load, []
        asks, self.asks = self.asks, False
        return Raw(msgpack.encode(to_load)) if to_load or asks else None

    def awaits(self) -> bool:
        return bool(self.waiting)

    def update(self, result: Raw) -> None:
        told = msgpack.decode(result)
        available = set(told["available"])
        self.gone = (self.gone | self.available) - available
        self.available = available
        self.loaded |= set(told["loaded"])
        # An adapter that was unloaded before it had its slot never gets one.
        for digest in [*self.slots]:
            if digest not in available and digest not in self.loaded:
                del self.slots[digest]

    def reset(self, plans: Iterable[StepPlan]) -> None:
        for held in (self.slots, self.loaded, self.users, self.to_load):
            held.clear()
        self.asks = True
