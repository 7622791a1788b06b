"""Roster: the requests that have not ended, and the scheduling policies: in which order they are served."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable
from operator import attrgetter

from toolkit_lm.errors import RequestError
from toolkit_lm.messages import StepPlan
from toolkit_lm.plugin import SchedulingPolicyRegistry
from toolkit_lm.scheduler.request import Request, Sequence

SchedulingPolicy = Callable[[Request], tuple[float, ...]]
"""Sort key of a request that arrives, asked once: the smallest is served first, the largest is preempted first, and of equals the first
that came is served first.

It may read the request's `priority`, `num_prompt_tokens`, `max_output_tokens`, `arrival_time`, `deadline`, `params` and `context`. A policy
that has to remember is a class without arguments, of which each engine makes one; its method `started` is told of requests that leave
the queue, whose `sort_key` begins with what the policy gave.
"""


def fcfs(request: Request) -> tuple[float, ...]:
    """First come, first served."""
    return ()


def priority(request: Request) -> tuple[float, ...]:
    """The smaller number first."""
    return (request.priority,)


class LoadedPolicy:
    """A registered policy; where it fails on a request, it raises RequestError, which names the plugin."""

    def __init__(self, registry: SchedulingPolicyRegistry, name: str) -> None:
        """Raises ConfigError for an unknown name, PluginError for one that cannot be imported."""
        target, self._owner, self._name = registry.load(name), registry.get(name).owner, name
        self._policy = target() if isinstance(target, type) else target
        self.started = getattr(self._policy, "started", None)

    def __call__(self, request: Request) -> tuple[float, ...]:
        try:
            key = tuple(self._policy(request))
            if any(map(math.isnan, key)):
                raise ValueError(f"its key is {key}")
            return key
        except Exception as error:
            raise RequestError(self._owner.failure(error, f"scheduling policy {self._name!r}")) from error


_by_sort_key = attrgetter("sort_key")


class Roster:
    """Which requests wait and which run, their unfinished sequences, and what the worker is to forget of them."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.policy = policy
        self.requests: dict[str, Request] = {}
        """By request id."""
        self.waiting: list[Request] = []
        """In the policy's order."""
        self.running: list[Request] = []
        """In the policy's order: blocks are taken from the last."""
        self.sequences: dict[int, Sequence] = {}
        """The unfinished ones, by seq_id."""
        self.dropped: list[int] = []
        """Sequences that the worker holds, to be dropped by the next plan."""

    @property
    def num_running(self) -> int:
        """Sequences of running requests; of a beam search, as many as it can come to have."""
        return sum(request.num_rows for request in self.running)

    def requests_in(self, plan: StepPlan) -> list[str]:
        """The ids of the requests that a plan computes, in its order."""
        request_ids: dict[str, None] = {}
        for row in plan.scheduled:
            seq = self.sequences.get(row.seq_id)
            if seq is not None:
                request_ids[seq.request.request_id] = None
        return list(request_ids)

    def add(self, request: Request) -> None:
        """A new request waits. Raises RequestError where the policy fails on it."""
        request.sort_key = (*self.policy(request), request.arrival_time, request.number)
        self.requests[request.request_id] = request
        self.add_sequences(request.sequences)
        insort(self.waiting, request, key=_by_sort_key)

    def add_sequences(self, sequences: Iterable[Sequence]) -> None:
        self.sequences.update({seq.seq_id: seq for seq in sequences})

    def start(self, request: Request) -> None:
        """From the queue to the batch."""
        self.waiting.remove(request)
        if (started := getattr(self.policy, "started", None)) is not None:
            started(request)
        insort(self.running, request, key=_by_sort_key)

    def requeue(self, request: Request) -> None:
        """From the batch back to the queue; the worker forgets it."""
        self.running.remove(request)
        insort(self.waiting, request, key=_by_sort_key)
        for seq in request.unfinished:
            self._drop(seq)

    def remove_sequence(self, seq: Sequence) -> None:
        """It has ended, or other beams have taken its place; the worker forgets it."""
        self._drop(seq)
        del self.sequences[seq.seq_id]

    def remove(self, request: Request) -> None:
        """All of its sequences have ended."""
        del self.requests[request.request_id]
        (self.running if request in self.running else self.waiting).remove(request)

    def requeue_all(self, plans: Iterable[StepPlan]) -> None:
        """All requests wait. The worker is to forget them, and what `plans` were to have it forget."""
        for plan in plans:
            self.dropped += plan.dropped
        self.dropped += self.sequences
        self.running, self.waiting = [], sorted(self.requests.values(), key=_by_sort_key)

    def _drop(self, seq: Sequence) -> None:
        if seq.on_worker:
            self.dropped.append(seq.seq_id)
            seq.on_worker = False
