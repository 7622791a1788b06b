"""In the scheduler: which adapters are in the workers' memory, and which ones rows may have."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from msgspec import Raw, msgpack
from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import TokenRange
from toolkit_lm.messages import StepPlan
from toolkit_lm.scheduler import Planner, Request

from toolkit_lm_lora.share import Order, Report, Use


class LoraPlanner(Planner):
    """At most `max_adapters` are active at a time. Of those that no request runs with, the longest
    unused makes room. If there is none, the adapter that has waited longest is next: requests of
    the active one that has fewest begin no more until it has its turn."""

    def __init__(self, config: VllmConfig, facts: Raw, *, options: Any) -> None:
        self._most = options.max_adapters
        gib = options.device_gib
        self._most_bytes = None if gib is None else int(gib * 2**30)
        self._patience = options.max_wait_seconds
        self._held: dict[str, int] = {}
        """By digest, bytes of the adapters in the workers' memory."""
        self._failed: dict[str, str] = {}
        self._asked: dict[str, tuple[str, bool]] = {}
        """By digest, path and whether it is pinned, of adapters that are being read."""
        self._to_load: dict[str, tuple[str, bool]] = {}
        """By digest, path and whether it is pinned."""
        self._active: dict[str, None] = {}
        """Digests, the longest unused first."""
        self._unwanted: list[str] = []
        """Digests of adapters to deactivate as soon as no request runs with them."""
        self._changes = Order([], [], [])
        self._users: dict[str, tuple[str, ...]] = {}
        """By request that runs, its adapters."""
        self._count: dict[str, int] = {}
        """By adapter, requests that run."""
        self._waiting: dict[str, dict[str, float]] = {}
        """By adapter without room, the waiting requests and since when they wait."""
        self._uses: dict[str, list[Use]] = {}
        self.update(facts)

    def _uses_of(self, request: Request) -> list[Use]:
        if (raw := request.inputs.parts.get("lora")) is None:
            return []
        if (known := self._uses.get(request.request_id)) is None:
            known = self._uses[request.request_id] = msgpack.decode(raw, type=list[Use])
        return known

    def may_begin(self, request: Request, tokens: TokenRange) -> str | None:
        uses = self._uses_of(request)
        if not uses:
            return None
        if len(uses) > self._most:
            raise ValueError(
                f"the request has {len(uses)} adapters, and a step may have {self._most}: raise "
                "the option max_adapters of the plugin lora"
            )
        reading = None
        for use in uses:
            if use.digest in self._failed:
                raise ValueError(f"adapter {use.name!r}: {self._failed.pop(use.digest)}")
            if use.digest not in self._held:
                if use.digest not in self._asked:
                    self._asked[use.digest] = use.path, use.pinned
                    self._to_load[use.digest] = use.path, use.pinned
                reading = f"{use.name} is being read"
        if reading is not None:
            return reading
        mine = {use.digest for use in uses}
        size = self._size(mine)
        if self._most_bytes is not None and size > self._most_bytes:
            raise ValueError(
                f"the request's adapters take {size / 2**30:.3f} GiB, and those of a step may take "
                f"{self._most_bytes / 2**30:g}: raise the option device_gib of the plugin lora"
            )
        missing = [use for use in uses if use.digest not in self._active]
        if missing:
            if not self._make_room(mine, {use.digest for use in missing}):
                for use in missing:
                    since = self._waiting.setdefault(use.digest, {})
                    since.setdefault(request.request_id, time.monotonic())
                return f"{missing[0].name} waits for room"
            for use in missing:
                self._active[use.digest] = None
                self._changes.activate.append(use.digest)
        elif (first := self._gives_way(mine, request)) is not None:
            return f"{uses[0].name} gives way to {first}"
        return None

    def _size(self, digests: Iterable[str]) -> int:
        return sum(self._held.get(digest, 0) for digest in digests)

    def _make_room(self, mine: set[str], missing: set[str]) -> bool:
        """Deactivates adapters without users for the missing ones of `mine`."""
        idle = [
            digest for digest in self._active if not self._count.get(digest) and digest not in mine
        ]
        left = len(self._active) + len(missing)
        size = self._size(self._active) + self._size(missing)
        gone = []
        for digest in idle:
            if left <= self._most and (self._most_bytes is None or size <= self._most_bytes):
                break
            left -= 1
            size -= self._size([digest])
            gone.append(digest)
        if left > self._most or (self._most_bytes is not None and size > self._most_bytes):
            return False
        for digest in gone:
            self._deactivate(digest)
        return True

    def _deactivate(self, digest: str) -> None:
        del self._active[digest]
        if digest in self._changes.activate:
            self._changes.activate.remove(digest)
        self._changes.deactivate.append(digest)

    def _gives_way(self, mine: set[str], request: Request) -> str | None:
        """The adapter that has waited too long, if one of `mine` makes room for it."""
        if not self._waiting:
            return None
        oldest = ((min(those.values()), digest) for digest, those in self._waiting.items())
        since, digest = min(oldest)
        if time.monotonic() - since < self._patience or request.arrival_time < since:
            return None
        fewest = min(self._active, key=lambda name: self._count.get(name, 0))
        return digest[:8] if fewest in mine else None

    def begin(self, plan: StepPlan, request: Request) -> None:
        uses = self._uses_of(request)
        if not uses:
            return
        digests = tuple(use.digest for use in uses)
        self._users[request.request_id] = digests
        for digest in digests:
            self._count[digest] = self._count.get(digest, 0) + 1
            if digest not in self._active:
                # `may_begin` is asked first, and resets clear what it found.
                self._active[digest] = None
                self._changes.activate.append(digest)
            self._active[digest] = self._active.pop(digest)
        self._forget_waiting(request.request_id)

    def release(self, request_id: str) -> None:
        for digest in self._users.pop(request_id, ()):
            self._count[digest] -= 1
            if not self._count[digest]:
                del self._count[digest]
        self._forget_waiting(request_id)
        self._uses.pop(request_id, None)

    def _forget_waiting(self, request_id: str) -> None:
        for digest in [digest for digest, those in self._waiting.items() if request_id in those]:
            del self._waiting[digest][request_id]
            if not self._waiting[digest]:
                del self._waiting[digest]

    def end_step(self) -> Raw | None:
        load, self._to_load = self._to_load, {}
        for digest in self._unwanted:
            if digest in self._active and not self._count.get(digest):
                self._deactivate(digest)
        changes, self._changes = self._changes, Order([], [], [])
        changes.load = [(digest, *asked) for digest, asked in load.items()]
        if not (changes.load or changes.activate or changes.deactivate):
            return None
        # In order: what was deactivated and activated again is active.
        changes.deactivate = [digest for digest in changes.deactivate if digest not in self._active]
        return Raw(msgpack.encode(changes))

    def awaits(self) -> bool:
        return bool(self._asked)

    def update(self, result: Raw) -> None:
        report = msgpack.decode(result, type=Report)
        self._held = report.held
        self._unwanted = report.unwanted
        for digest in [*self._asked]:
            if digest in report.failed:
                self._failed[digest] = report.failed[digest]
            if digest in self._held or digest in report.failed or digest in report.dropped:
                del self._asked[digest]

    def reset(self, plans: Iterable[StepPlan]) -> None:
        # The workers keep what they have read; what is active is told anew.
        for held in (self._active, self._users, self._count, self._waiting):
            held.clear()
        self._to_load = dict(self._asked)
        self._changes = Order([], [], [])
