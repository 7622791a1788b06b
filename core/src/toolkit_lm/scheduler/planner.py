"""Planner: the half of a part that decides, in the scheduler, what a step holds of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence as Collection
from types import MappingProxyType
from typing import Any

from msgspec import Raw

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.kv.group_blocks import TokenRange
from toolkit_lm.messages import StepPlan, StepResult
from toolkit_lm.plugin import PluginInfo, Plugins
from toolkit_lm.scheduler.request import Refused, Request

MEDIA = "media"
"""The part that the engine brings: items of media."""
NIL = Raw(b"\xc0")
"""None, in msgpack."""


class Planner:
    """One per engine, called from its thread. This base does nothing; only methods that a subclass
    defines are called. Its module imports no torch.

    It accounts for what the worker's half holds, and tells that half by `plan.parts[name]`, which
    is sent as it is. A request's share of the part is `request.inputs.parts.get(name)`. What a
    method raises that is asked about a request fails that request, with the plugin named; what
    another raises fails all requests with a share of the part, those to come too. Others go on.
    """

    def __init__(self, config: VllmConfig, facts: Raw, *, options: Any) -> None:
        """`config` is resolved. `facts`: what the worker's half said of itself, as msgpack; nil
        where it said nothing. `options`: the plugin's own, or None."""

    def may_begin(self, request: Request, tokens: TokenRange) -> str | None:
        """Whether a request that waits may begin with these tokens of its first sequence: None, or
        why it waits on, such as "no slot". It takes nothing: others may refuse still."""
        return None

    def begin(self, plan: StepPlan, request: Request) -> None:
        """A request begins, or comes back after it had to wait: takes what it holds until
        `release`, and may write `plan.parts`."""

    def end_of(self, request: Request) -> int:
        """Asked once, when a request arrives: tokens from here on are nothing to `fit` and
        `commit`. By default all are something to them, which costs each step of the request."""
        return sys.maxsize

    def fit(self, request: Request, ranges: Collection[TokenRange]) -> list[TokenRange]:
        """What of these ranges the next step can compute. An end may come earlier; a range that
        would be empty is left out."""
        return list(ranges)

    def commit(self, plan: StepPlan, request: Request, ranges: Collection[TokenRange]) -> None:
        """The step computes these ranges, which `fit`. Takes what they need, and may write
        `plan.parts`."""

    def release(self, request_id: str) -> None:
        """A request has ended, or waits again. Called for those too that hold nothing."""

    def end_step(self) -> Raw | None:
        """A step is planned, or has no rows. Returns `plan.parts[name]`; None: what there is, if
        anything. Something to tell makes a step, without rows too."""
        return None

    def awaits(self) -> bool:
        """Whether there is something to tell the worker's half, or to hear of it, though nothing
        else is to be computed. Then steps without rows follow, some milliseconds apart."""
        return False

    def update(self, result: Raw) -> None:
        """The worker's half has answered: `result.parts[name]` of a step, in the order of the
        plans."""

    def reset(self, plans: Iterable[StepPlan]) -> None:
        """Steps have failed: what these plans brought to the worker cannot be relied on. All
        requests wait, and hold nothing."""


class PlannerError(RequestError):
    """A planner has failed at a request. The text names the plugin."""


class Planners:
    """The planners of an engine. Of each method there is a list of those that override it, by name,
    so that what a planner leaves out costs nothing."""

    def __init__(self, owners: Mapping[str, PluginInfo] = MappingProxyType({})) -> None:
        """None yet. `owners`: the plugins of those to come, by part."""
        self.by_name: dict[str, Planner] = {}
        self.dropped: dict[str, str] = {}
        """Those that have failed, by name, and how."""
        self.failed: list[str] = []
        """The same, until the scheduler has ended their requests."""
        self._owners = owners
        self._list()

    @classmethod
    def make(cls, config: VllmConfig, plugins: Plugins, facts: Mapping[str, Raw]) -> Planners:
        """Those of plugins' parts. `facts`: by part, what its worker's half says. Raises
        PluginError."""
        entries = plugins.parts.used("planner", config)
        made = cls({entry.key: entry.owner for entry in entries})
        for entry in entries:
            its = facts.get(entry.key) or NIL
            options = plugins.options(entry.plugin)
            made.add(
                entry.key,
                plugins.parts.make_half(entry.key, "planner", config, its, options=options),
            )
        return made

    def add(self, name: str, planner: Planner) -> None:
        """One more."""
        self.by_name[name] = planner
        self._list()

    def take_failed(self, requests: Iterable[Request]) -> list[tuple[Request, str]]:
        """Those of the requests that have a share of a part that has failed since the last call,
        and how it has."""
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
        self.of_plugins = [name for name in self.by_name if name != MEDIA]
        self.awaiting = self._overridden("awaits")
        self._updates = dict(self._overridden("update"))

    def _overridden(self, method: str) -> list[tuple[str, Callable[..., Any]]]:
        return [
            (name, getattr(planner, method))
            for name, planner in self.by_name.items()
            if getattr(type(planner), method) is not getattr(Planner, method)
        ]

    # Asked about a request: raise PlannerError

    def take_in(self, request: Request) -> None:
        """A request has come: how far planners have a say in it. Raises RequestError where it has a
        share of a part whose planner has failed."""
        for name in request.inputs.parts:
            if name in self.dropped:
                raise RequestError(self.dropped[name])
        for name in dict([*self.fits, *self.commits]):
            end = self._ask(name, self.by_name[name].end_of, request)
            request.planned_end = max(request.planned_end, end)

    def refusal(self, request: Request, tokens: TokenRange) -> Refused | None:
        """Why a request that waits cannot begin with these tokens; None: it can."""
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
        """What of the ranges all planners have room for."""
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

    # About all of a part: who raises is dropped

    def release(self, request_id: str) -> None:
        for name, release in self.releases:
            self._tell(name, release, request_id)

    def end_step(self, plan: StepPlan) -> None:
        """Adds what planners have to tell of the step."""
        for name, end_step in self.end_steps:
            if (told := self._tell(name, end_step)) is not None:
                plan.parts[name] = told

    def awaits(self) -> bool:
        """A step without rows is worth its while."""
        return any(self._tell(name, awaits) for name, awaits in self.awaiting)

    def update(self, result: StepResult) -> None:
        for name, answer in result.parts.items():
            if (update := self._updates.get(name)) is not None:
                self._tell(name, update, answer)

    def reset(self, plans: Collection[StepPlan]) -> None:
        for name, reset in self._overridden("reset"):
            self._tell(name, reset, plans)

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
            # A fault of the engine's own.
            raise error
        return self._owners[name].failure(error, f"the planner of part {name!r}")
