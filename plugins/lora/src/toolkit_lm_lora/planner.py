"""In the scheduler: which adapters are in the workers' memory, and which ones rows may have."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import Any

from msgspec import Raw, msgpack
from msgspec.structs import replace
from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import TokenRange
from toolkit_lm.messages import StepPlan
from toolkit_lm.scheduler import Planner, Request

from toolkit_lm_lora.share import Order, Report, Use

Digests = tuple[str, ...]
"""The adapters of a request."""


class LoraPlanner(Planner):
    """A step has rows of at most `max_adapters` adapters. Requests of more may run: then adapters
    take turns, step by step, and those that had rows longest ago are next. So a request begins
    within a few steps, whatever others run."""

    def __init__(self, config: VllmConfig, facts: Raw, *, options: Any) -> None:
        self._most = options.max_adapters
        gib = options.device_gib
        self._most_bytes = None if gib is None else int(gib * 2**30)
        self._held: dict[str, int] = {}
        """By digest, bytes of the adapters in the workers' memory."""
        self._failed: dict[str, str] = {}
        self._asked: dict[str, tuple[str, bool]] = {}
        """By digest, path and whether it is pinned, of adapters that are being read."""
        self._to_load: dict[str, tuple[str, bool]] = {}
        """By digest, path and whether it is pinned."""
        self._active: dict[str, None] = {}
        """Digests of the adapters that workers have ready for rows, the longest unused first. More
        than `max_adapters` where requests run with more."""
        self._unwanted: list[str] = []
        """Digests of adapters to deactivate as soon as no request runs with them."""
        self._changes = Order([], [], [])
        self._users: dict[str, Digests] = {}
        """By request that runs, its adapters."""
        self._count: dict[str, int] = {}
        """By adapter, requests that run."""
        self._waiting: dict[Digests, None] = {}
        """Adapters of requests that have asked for room in this step, and found none."""
        self._turn: set[str] = set()
        """Digests of the adapters that the step may have rows of."""
        self._last: dict[Digests, int] = {}
        """By adapters of a request, the step that they last had rows in, or first asked in."""
        self._num_steps = 0
        self._requests: dict[str, tuple[Request, int]] = {}
        """Running requests, each with the end of what other planners see."""
        self._takes_turns = False
        """The next step has no room for the adapters of all requests that run."""
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
        if request.features:
            _rename(request, uses)
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
        mine = tuple(sorted({use.digest for use in uses}))
        size = self._size(mine)
        if self._most_bytes is not None and size > self._most_bytes:
            raise ValueError(
                f"the request's adapters take {size / 2**30:.3f} GiB, and those of a step may take "
                f"{self._most_bytes / 2**30:g}: raise the option device_gib of the plugin lora"
            )
        if not self._fit({*self._turn, *mine}):
            self._waiting[mine] = None
            self._last.setdefault(mine, self._num_steps)
            return f"{uses[0].name} waits for its turn"
        return None

    def _size(self, digests: Iterable[str]) -> int:
        return sum(self._held.get(digest, 0) for digest in digests)

    def _fit(self, digests: Collection[str]) -> bool:
        """Whether a step may have rows of these adapters."""
        return len(digests) <= self._most and (
            self._most_bytes is None or self._size(digests) <= self._most_bytes
        )

    def end_of(self, request: Request) -> int:
        # `fit` is asked only while adapters take turns.
        return 0

    def fit(self, request: Request, ranges: Collection[TokenRange]) -> list[TokenRange]:
        mine = self._users.get(request.request_id)
        if mine is None:
            return list(ranges)
        if not self._turn.issuperset(mine):
            return []
        if ranges:
            self._last[mine] = self._num_steps
        return list(ranges)

    def begin(self, plan: StepPlan, request: Request) -> None:
        uses = self._uses_of(request)
        if not uses:
            return
        mine = tuple(sorted({use.digest for use in uses}))
        self._users[request.request_id] = mine
        for digest in mine:
            self._count[digest] = self._count.get(digest, 0) + 1
            if digest not in self._active:
                self._changes.activate.append(digest)
            self._active[digest] = self._active.pop(digest, None)
        self._turn.update(mine)
        self._last[mine] = self._num_steps
        self._requests[request.request_id] = request, request.planned_end
        if self._takes_turns:
            request.planned_end = sys.maxsize

    def release(self, request_id: str) -> None:
        for digest in self._users.pop(request_id, ()):
            self._count[digest] -= 1
            if not self._count[digest]:
                del self._count[digest]
                self._turn.discard(digest)
        if (known := self._requests.pop(request_id, None)) is not None:
            known[0].planned_end = known[1]
        self._uses.pop(request_id, None)

    def _choose(self) -> None:
        """Chooses the adapters of the next step: those that had rows longest ago first, each with
        the others of its request."""
        self._num_steps += 1
        wanted = {**dict.fromkeys(self._users.values()), **self._waiting}
        self._waiting = {}
        self._turn = {digest for mine in wanted for digest in mine}
        takes_turns = not self._fit(self._turn)
        if takes_turns != self._takes_turns:
            self._takes_turns = takes_turns
            for request, end in self._requests.values():
                request.planned_end = sys.maxsize if takes_turns else end
        if not takes_turns:
            self._last = {}
            return
        self._last = {mine: self._last.get(mine, 0) for mine in wanted}
        self._turn = set()
        for mine in sorted(wanted, key=self._last.__getitem__):
            if self._fit({*self._turn, *mine}):
                self._turn.update(mine)

    def _deactivate(self, digest: str) -> None:
        del self._active[digest]
        if digest in self._changes.activate:
            self._changes.activate.remove(digest)
        self._changes.deactivate.append(digest)

    def end_step(self) -> Raw | None:
        load, self._to_load = self._to_load, {}
        if self._users or self._waiting or self._turn:
            self._choose()
        if self._unwanted or not self._fit(self._active):
            self._drop_idle()
        changes, self._changes = self._changes, Order([], [], [])
        changes.load = [(digest, *asked) for digest, asked in load.items()]
        if not (changes.load or changes.activate or changes.deactivate):
            return None
        # In order: what was deactivated and activated again is active.
        changes.deactivate = [digest for digest in changes.deactivate if digest not in self._active]
        return Raw(msgpack.encode(changes))

    def _drop_idle(self) -> None:
        """Deactivates adapters that no request runs with: unwanted ones, and as many as there are
        too many."""
        for digest in [digest for digest in self._active if not self._count.get(digest)]:
            if digest in self._unwanted or not self._fit(self._active):
                self._deactivate(digest)

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
        for request, end in self._requests.values():
            request.planned_end = end
        self._takes_turns = False
        for known in (self._active, self._users, self._count, self._waiting, self._requests):
            known.clear()
        self._turn.clear()
        self._to_load = dict(self._asked)
        self._changes = Order([], [], [])


def _rename(request: Request, uses: list[Use]) -> None:
    """Gives items of media names of their own, so that no other adapter's embeddings are read."""
    changing = sorted(f"{use.digest}*{use.scale}" for use in uses if use.may_change_media)
    suffix = f" {' '.join(changing)}"
    if changing and not request.features[0].mm_identifier.endswith(suffix):
        request.features = [
            replace(feature, mm_identifier=f"{feature.mm_identifier}{suffix}")
            for feature in request.features
        ]
