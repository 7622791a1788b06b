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
    """Tells workers (slot, name, digest) of what to load, and hears {digest: what went wrong, or
    None}. Of the slots that nobody uses, the longest unused goes first."""

    def __init__(self, config: VllmConfig, facts: Raw, *, options: Any) -> None:
        self.num_slots = options.num_slots
        self.slots: dict[str, int] = {}
        """By digest, in the order of last use."""
        self.loaded: set[str] = set()
        self.faults: dict[str, str] = {}
        self.users: dict[str, str] = {}
        """By request that runs, its digest."""
        self.to_load: list[tuple[int, str, str]] = []

    def may_begin(self, request: Request, tokens: TokenRange) -> str | None:
        if (raw := request.inputs.parts.get("lora")) is None:
            return None
        name, digest = msgpack.decode(raw)
        if digest in self.faults:
            raise ValueError(f"adapter {name!r}: {self.faults.pop(digest)}")
        if digest in self.slots:
            return None if digest in self.loaded else "is loading"
        if (slot := self._free_slot()) is None:
            return "no slot"
        self.slots[digest] = slot
        self.to_load.append((slot, name, digest))
        return "is loading"

    def _free_slot(self) -> int | None:
        free = set(range(self.num_slots)) - set(self.slots.values())
        if free:
            return min(free)
        held = set(self.users.values())
        unused = [one for one in self.slots if one in self.loaded and one not in held]
        if not unused:
            return None
        self.loaded.remove(unused[0])
        return self.slots.pop(unused[0])

    def begin(self, plan: StepPlan, request: Request) -> None:
        if (raw := request.inputs.parts.get("lora")) is not None:
            _, digest = msgpack.decode(raw)
            self.users[request.request_id] = digest
            self.slots[digest] = self.slots.pop(digest)

    def release(self, request_id: str) -> None:
        self.users.pop(request_id, None)

    def end_step(self) -> Raw | None:
        to_load, self.to_load = self.to_load, []
        return Raw(msgpack.encode(to_load)) if to_load else None

    def update(self, result: Raw) -> None:
        for digest, fault in msgpack.decode(result).items():
            if fault is None:
                self.loaded.add(digest)
            else:
                self.faults[digest] = fault
                self.slots.pop(digest, None)

    def reset(self, plans: Iterable[StepPlan]) -> None:
        for held in (self.slots, self.loaded, self.users, self.to_load):
            held.clear()
