"""Planner: the half of a part that runs in the scheduler, and decides on the part's share of a
step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence as Collection
from types import MappingProxyType
from typing import Any

from msgspec import Raw

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.kv.group_blocks import GroupBlocks, TokenRange
from toolkit_lm.messages import StepPlan, StepResult
from toolkit_lm.plugin import PluginInfo, Plugins
from toolkit_lm.scheduler.request import Refused, Request, Sequence

MEDIA = "media"
"""Name of core's own part: multimodal items."""
NIL = Raw(b"\xc0")
"""None, in msgpack."""


class Planner:
    """Scheduler half of a part. There is one per engine, called from the engine's thread. This base
    does nothing; only methods that a subclass overrides are called. Its module imports no torch.

    The planner accounts for what the worker half holds, and sends it `plan.parts[name]` unchanged.
    A request's data for the part is `request.inputs.parts.get(name)`. An exception in a method that
    takes a request fails that request, and the error names the plugin. An exception in another
    method fails all requests that use the part, later ones included. Other requests continue.
    """

    engine: Any
    """The EngineCore, set after the constructor: for methods that `call_workers` calls.
    `worker_method` marks them, as it does those of a worker's half."""

    def __init__(self, config: VllmConfig, facts: Raw, *, options: Any) -> None:
        """`config` is resolved. `facts`: the worker half's description of itself, as msgpack; nil
        if there is none. `options`: the plugin's own options, or None."""

    def may_begin(self, request: Request, tokens: TokenRange) -> str | None:
        """Returns None if a waiting request may begin with these tokens of its first sequence.
        Otherwise returns why it waits, such as "no slot". Nothing may be allocated here, since
        others may still refuse."""
        return None

    def begin(self, plan: StepPlan, request: Request) -> None:
        """A request begins, or resumes after it had to wait. Allocates what the request holds until
        `release`. May write `plan.parts`."""

    def end_of(self, request: Request) -> int:
        """Returns the position from which on tokens skip `fit` and `commit`. Called once, when a
        request arrives. By default no token skips them, which costs time in each step of the
        request."""
        return sys.maxsize

    def fit(self, request: Request, ranges: Collection[TokenRange]) -> list[TokenRange]:
        """Returns the part of these ranges that the next step can compute. A range may end earlier;
        an empty range is left out."""
        return list(ranges)

    def commit(self, plan: StepPlan, request: Request, ranges: Collection[TokenRange]) -> None:
        """The step computes these ranges, which come from `fit`. Allocates what they need, and may
        write `plan.parts`."""

    def release(self, request_id: str) -> None:
        """A request has ended, or waits again. Also called for requests that hold nothing."""

    def end_step(self) -> Raw | None:
        """A step is planned, or has no rows. Returns `plan.parts[name]`; None keeps the present
        value, if any. A value makes a step even without rows."""
        return None

    def awaits(self) -> bool:
        """Whether the planner has data to send to the worker half, or to receive from it, although
        nothing else is to be computed. Steps without rows then follow, some milliseconds apart."""
        return False

    def update(self, result: Raw) -> None:
        """Receives the worker half's answer, `result.parts[name]` of a step. Answers come in the
        order of the plans."""

    def reset(self, plans: Iterable[StepPlan]) -> None:
        """Steps have failed: the worker may not have what these plans brought. All requests wait,
        and hold nothing."""

    def stored(self, seq: Sequence, group: GroupBlocks, indices: list[int]) -> None:
        """Other sequences can find full blocks of a sequence from now on: those with these indices
        in its block table of a KV group, in ascending order. Block i of the group has the digest
        `seq.block_hashes(group.size, i + group.later + 1)[i + group.later]`. Snapshots and blocks
        of encoders are not told."""

    def forgotten(self, content: tuple[int, bytes] | None) -> None:
        """(group index, digest) of a block that nobody finds any more; None: of all blocks of a
        pool. Also called for what `stored` has not told."""

    def close(self) -> None:
        """The engine ends."""


class PlannerError(RequestError):
    """A planner has failed on a request. The message names the plugin."""


class Planners:
    """All planners of an engine. Each method has a list of the planners that override it, so a
    method that a planner lacks costs nothing."""

    def __init__(self, owners: Mapping[str, PluginInfo] = MappingProxyType({})) -> None:
        """Starts without planners. `owners`: the plugins of later ones, by part."""
        self.by_name: dict[str, Planner] = {}
        self.dropped: dict[str, str] = {}
        """Error messages of failed parts, by name."""
        self.failed: list[str] = []
        """Names of failed parts whose requests the scheduler has not ended yet."""
        self._owners = owners
        self._list()

    @classmethod
    def make(
        cls, config: VllmConfig, plugins: Plugins, facts: Mapping[str, Raw], engine: object = None
    ) -> Planners:
        """Makes the planners of plugins' parts. `facts`: the worker half's description of itself,
        by part. Raises PluginError."""
        entries = plugins.parts.used("planner", config)
        made = cls({entry.key: entry.owner for entry in entries})
        for entry in entries:
            fact = facts.get(entry.key) or NIL
            options = plugins.options(entry.plugin)
            half = plugins.parts.make_half(entry.key, "planner", config, fact, options=options)
            half.engine = engine
            made.add(entry.key, half)
        return made

    def add(self, name: str, planner: Planner) -> None:
        """Adds a planner."""
        self.by_name[name] = planner
        self._list()

    def drain_failed(self, requests: Iterable[Request]) -> list[tuple[Request, str]]:
        """Returns the requests that use a part which has failed since the last call, each with the
        error message."""
        failed, self.failed = self.failed, []
        return [
            (request, self.dropped[name])
            for request in requests
            for name in failed
            if name in request.inputs.parts
        ]

    def _list(self) -> None:
        self.may_begin = self._overridden("may_begin")
        self.begins = self._overridden("begin")
        self.fits = self._overridden("fit")
        self.commits = self._overridden("commit")
        self.releases = self._overridden("release")
        self.end_steps = self._overridden("end_step")
        methods = dict([*self.fits, *self.commits, *self.releases])
        self.of_plugins = [name for name in methods if name != MEDIA]
        self.awaiting = self._overridden("awaits")
        self._stores = self._overridden("stored")
        self._forgets = self._overridden("forgotten")
        self.watching = bool(self._stores or self._forgets)
        """A planner watches the contents of blocks."""
        self._updates = dict(self._overridden("update"))

    def _overridden(self, method: str) -> list[tuple[str, Callable[..., Any]]]:
        return [
            (name, getattr(planner, method))
            for name, planner in self.by_name.items()
            if getattr(type(planner), method) is not getattr(Planner, method)
        ]

    # These take a request, and raise PlannerError.

    def prepare(self, request: Request) -> None:
        """Prepares a new request: finds the tokens that planners must see. Raises RequestError if
        the request uses a part whose planner has failed."""
        for name in request.inputs.parts:
            if name in self.dropped:
                raise RequestError(self.dropped[name])
        for name in dict([*self.fits, *self.commits]):
            end = self._ask(name, self.by_name[name].end_of, request)
            request.planned_end = max(request.planned_end, end)

    def refusal(self, request: Request, tokens: TokenRange) -> Refused | None:
        """Returns why a waiting request cannot begin with these tokens; None: it can."""
        for name, may_begin in self.may_begin:
            if (reason := self._ask(name, may_begin, request, tokens)) is not None:
                return Refused("part", f"{name}: {reason}")
        for name, fit in self.fits if request.planned_end else ():
            if not self._ask(name, fit, request, [tokens]):
                return Refused("media") if name == MEDIA else Refused("part", f"{name}: no room")
        return None

    def begin(self, plan: StepPlan, request: Request) -> None:
        for name, begin in self.begins:
            self._ask(name, begin, plan, request)

    def fit(self, request: Request, ranges: list[TokenRange]) -> list[TokenRange]:
        """Returns the part of the ranges that all planners have room for."""
        for name, fit in self.fits:
            ranges = self._ask(name, fit, request, ranges)
        return ranges

    def commit(self, plan: StepPlan, request: Request, ranges: Collection[TokenRange]) -> None:
        for name, commit in self.commits:
            self._ask(name, commit, plan, request, ranges)

    def _ask(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Exception as error:
            raise PlannerError(self._failure(name, error)) from error

    # These concern all requests of a part. A planner that raises is dropped.

    def release(self, request_id: str) -> None:
        for name, release in self.releases:
            self._tell(name, release, request_id)

    def end_step(self, plan: StepPlan) -> None:
        """Adds the planners' data for the step to the plan."""
        for name, end_step in self.end_steps:
            if (data := self._tell(name, end_step)) is not None:
                plan.parts[name] = data

    def awaits(self) -> bool:
        """Whether a planner needs a step even without rows."""
        return any(self._tell(name, awaits) for name, awaits in self.awaiting)

    def update(self, result: StepResult) -> None:
        for name, answer in result.parts.items():
            if (update := self._updates.get(name)) is not None:
                self._tell(name, update, answer)

    def reset(self, plans: Collection[StepPlan]) -> None:
        for name, reset in self._overridden("reset"):
            self._tell(name, reset, plans)

    def stored(self, seq: Sequence, group: GroupBlocks, indices: list[int]) -> None:
        for name, stored in self._stores:
            self._tell(name, stored, seq, group, indices)

    def forgotten(self, content: tuple[int, bytes] | None) -> None:
        for name, forgotten in self._forgets:
            self._tell(name, forgotten, content)

    def close(self) -> None:
        for name, close in self._overridden("close"):
            self._tell(name, close)

    def _tell(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Exception as error:
            self.dropped[name] = self._failure(name, error)
            self.failed.append(name)
            self.by_name.pop(name, None)
            self._list()
            return None

    def _failure(self, name: str, error: Exception) -> str:
        if name not in self._owners:
            # An error of the engine itself.
            raise error
        return self._owners[name].failure(error, f"the planner of part {name!r}")
