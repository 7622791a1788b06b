"""Roster: the requests that have not ended, and the scheduling policies: in which order they are
served."""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Sequence as Collection
from operator import attrgetter

from toolkit_lm.config import SchedulerConfig
from toolkit_lm.errors import PluginError
from toolkit_lm.events import Wait
from toolkit_lm.messages import StepPlan
from toolkit_lm.plugin import SchedulingPolicyRegistry
from toolkit_lm.scheduler.encoder import Encoder
from toolkit_lm.scheduler.request import Refused, Request, Sequence


class SchedulingPolicy:
    """In which order requests are served, and how steps are shared between them. This one: first
    come, first served.

    A plugin registers a function, which is `key`, or a subclass, of which each engine makes one. A
    policy may read a request's `priority`, `num_prompt_tokens`, `max_output_tokens`,
    `arrival_time`, `deadline`, `params`, `context`, `num_rows`, `num_wanted_tokens`, `least_tokens`
    and `gave_way`.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        pass

    def key(self, request: Request) -> tuple[float, ...]:
        """Sort key of a request that arrives, asked once: the smallest is served first, and of
        equals the first that came."""
        return ()

    def begin_step(
        self, running: Collection[Request], waiting: Collection[Request]
    ) -> Collection[Request]:
        """A step is planned. `running`: who runs; `waiting`: who waits. Both in the order of keys.
        Returns who of these may be admitted."""
        return waiting

    def grant(self, request: Request, budget: int) -> int:
        """Most tokens of a request that this step computes, of at most `budget`. Asked once a step,
        in the order of keys."""
        return budget

    def overtakes(self, request: Request, other: Request) -> bool:
        """One that waits may be admitted before `other`, which comes first and has no room."""
        return False

    def gives_way(self, request: Request, running: Collection[Request]) -> Request | None:
        """Which of `running` is preempted where `request`, the first of them or one that waits, has
        no room. None: none is.

        Who gives way to one that waits then waits behind it.
        """
        return running[-1] if request is running[0] else None

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long."""


class _ByKey(SchedulingPolicy):
    def __init__(
        self, config: SchedulerConfig, function: Callable[[Request], tuple[float, ...]]
    ) -> None:
        super().__init__(config)
        self._function = function

    def key(self, request: Request) -> tuple[float, ...]:
        return self._function(request)


def priority(request: Request) -> tuple[float, ...]:
    """The smaller number first."""
    return (request.priority,)


def load_policy(registry: SchedulingPolicyRegistry, config: SchedulerConfig) -> SchedulingPolicy:
    """The one that the option asks for.

    Raises ConfigError for an unknown name, PluginError for one that cannot be imported, or that is
    a class of something else.
    """
    target = registry.load(config.policy)
    if not isinstance(target, type):
        return _ByKey(config, target)
    if not issubclass(target, SchedulingPolicy):
        what = f"{target.__module__}.{target.__qualname__}"
        raise PluginError(
            f"scheduling policy {config.policy!r}: {what} is no subclass of "
            "toolkit_lm.scheduler.SchedulingPolicy"
        )
    return target(config)


_by_sort_key = attrgetter("sort_key")


class Roster:
    """Which requests wait and which run, their unfinished sequences, and what the worker is to
    forget of them."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.policy = policy
        self.requests: dict[str, Request] = {}
        """By request id."""
        self.waiting: list[Request] = []
        """In the policy's order."""
        self.loading: list[Request] = []
        """Whose blocks are being filled: they wait for that, and hold these blocks."""
        self.waits: Counter[Wait] = Counter()
        """How many wait, by reason."""
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
        """A new request waits. Raises what the policy raises, and ValueError for a key that cannot
        be ordered."""
        key = tuple(self.policy.key(request))
        if any(map(math.isnan, key)):
            raise ValueError(f"its key is {key}")
        request.sort_key = (*key, request.arrival_time, request.number)
        self.requests[request.request_id] = request
        self.add_sequences(request.unfinished)
        self._wait(request, Refused("queue"))

    def add_sequences(self, sequences: Iterable[Sequence]) -> None:
        self.sequences.update({seq.seq_id: seq for seq in sequences})

    def start(self, request: Request) -> None:
        """From the queue to the batch."""
        self._leave_queue(request)
        insort(self.running, request, key=_by_sort_key)

    def load(self, request: Request) -> None:
        """From the queue to those that are being loaded."""
        self.hold(request, Refused("loading"))
        self._leave_queue(request)
        self.loading.append(request)

    def loaded(self, request: Request) -> None:
        """Back to the queue."""
        self.loading.remove(request)
        self._wait(request, Refused("queue"))

    def hold(self, request: Request, refused: Refused) -> None:
        """One that waits does so for this reason now."""
        if request.waits != refused:
            if request.waits is not None:
                self.waits[request.waits.reason] -= 1
            self.waits[refused.reason] += 1
            request.waits = refused

    def hold_back(self, asked: Iterable[Request], allowed: Iterable[Request]) -> None:
        """The policy lets only those of `asked` begin that are allowed."""
        numbers = {request.number for request in allowed}
        for request in asked:
            if request.number not in numbers:
                self.hold(request, Refused("policy"))

    def _wait(self, request: Request, refused: Refused) -> None:
        insort(self.waiting, request, key=_by_sort_key)
        self.waits[refused.reason] += 1
        request.waits = refused

    def _leave_queue(self, request: Request) -> None:
        self.waiting.remove(request)
        assert request.waits is not None, "it has waited"
        self.waits[request.waits.reason] -= 1

    def requeue(self, request: Request, refused: Refused = Refused("queue")) -> None:
        """From the batch back to the queue; the worker forgets it."""
        self.running.remove(request)
        self._wait(request, refused)
        for part in request.parts:
            self._drop(part)

    def remove_sequence(self, seq: Sequence) -> None:
        """It has ended, or other beams have taken its place; the worker forgets it."""
        self._drop(seq)
        del self.sequences[seq.seq_id]

    def remove(self, request: Request) -> None:
        """All of its sequences have ended."""
        if request.encoder is not None:
            self._drop(request.encoder)
        del self.requests[request.request_id]
        if request in self.running:
            self.running.remove(request)
        elif request in self.loading:
            self.loading.remove(request)
        else:
            self._leave_queue(request)

    def requeue_all(self, plans: Iterable[StepPlan]) -> None:
        """All requests wait. The worker is to forget them, and what `plans` were to have it
        forget."""
        for plan in plans:
            self.dropped += plan.dropped
        self.dropped += (seq_id for request in self.requests.values() for seq_id in request.seq_ids)
        self.running = []
        self.loading = []
        self.waiting = sorted(self.requests.values(), key=_by_sort_key)
        self.waits = Counter()
        self.waits["queue"] = len(self.waiting)
        for request in self.waiting:
            request.waits = Refused("queue")

    def _drop(self, part: Sequence | Encoder) -> None:
        if part.on_worker:
            self.dropped.append(part.seq_id)
            part.on_worker = False
