"""Roster: the requests that have not ended. SchedulingPolicy: the order in which they are
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
    """Order in which requests are served, and their shares of a step. This base: first come, first
    served.

    A plugin registers a function, which is used as `key`, or a subclass, which each engine
    instantiates. A policy may read a request's `priority`, `num_prompt_tokens`,
    `max_output_tokens`, `arrival_time`, `deadline`, `params`, `context`, `num_rows`,
    `num_wanted_tokens`, `least_tokens` and `gave_way`.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        pass

    def key(self, request: Request) -> tuple[float, ...]:
        """Returns the sort key of a new request; it is called once. The smallest key is served
        first, and among equal keys the first request to arrive."""
        return ()

    def begin_step(
        self, running: Collection[Request], waiting: Collection[Request]
    ) -> Collection[Request]:
        """Called before a step is planned, with running and waiting requests in the order of keys.
        Returns the waiting requests that may be admitted."""
        return waiting

    def grant(self, request: Request, budget: int) -> int:
        """Returns the most tokens of a request that this step computes, at most `budget`. Called
        once per step, in the order of keys."""
        return budget

    def overtakes(self, request: Request, other: Request) -> bool:
        """Whether a waiting request may be admitted before `other`, which comes first and does not
        fit."""
        return False

    def gives_way(self, request: Request, running: Collection[Request]) -> Request | None:
        """Chooses the running request that is preempted if `request` does not fit. `request` is the
        first of `running`, or a waiting one. None: no request is preempted.

        A request preempted for a waiting one then waits behind it.
        """
        return running[-1] if request is running[0] else None

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Records the duration of a step."""


class _ByKey(SchedulingPolicy):
    def __init__(
        self, config: SchedulerConfig, function: Callable[[Request], tuple[float, ...]]
    ) -> None:
        super().__init__(config)
        self._function = function

    def key(self, request: Request) -> tuple[float, ...]:
        return self._function(request)


def priority(request: Request) -> tuple[float, ...]:
    """Sorts by `priority`; the smaller number is first."""
    return (request.priority,)


def load_policy(registry: SchedulingPolicyRegistry, config: SchedulerConfig) -> SchedulingPolicy:
    """Returns the policy that the option names.

    Raises ConfigError for an unknown name, and PluginError for one that cannot be imported or is a
    class of another kind.
    """
    target = registry.load(config.policy)
    if not isinstance(target, type):
        return _ByKey(config, target)
    if not issubclass(target, SchedulingPolicy):
        name = f"{target.__module__}.{target.__qualname__}"
        raise PluginError(
            f"scheduling policy {config.policy!r}: {name} is no subclass of "
            "toolkit_lm.scheduler.SchedulingPolicy"
        )
    return target(config)


_by_sort_key = attrgetter("sort_key")


class Roster:
    """All requests, waiting and running, their unfinished sequences, and the sequences that the
    worker must drop."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.policy = policy
        self.requests: dict[str, Request] = {}
        """All requests that have not ended, by request id."""
        self.waiting: list[Request] = []
        """Waiting requests, in the policy's order."""
        self.loading: list[Request] = []
        """Requests that wait until their blocks are loaded from a KV tier. They hold these
        blocks."""
        self.waits: Counter[Wait] = Counter()
        """Number of waiting requests, by reason."""
        self.running: list[Request] = []
        """Running requests, in the policy's order. The last is preempted first."""
        self.sequences: dict[int, Sequence] = {}
        """Unfinished sequences, by seq_id."""
        self.dropped: list[int] = []
        """Sequences on the worker that the next plan drops."""

    @property
    def num_running(self) -> int:
        """Number of sequences of running requests. A beam search counts with as many beams as it
        may have."""
        return sum(request.num_rows for request in self.running)

    def requests_in(self, plan: StepPlan) -> list[str]:
        """Ids of the requests that a plan computes, in its order."""
        request_ids: dict[str, None] = {}
        for row in plan.scheduled:
            seq = self.sequences.get(row.seq_id)
            if seq is not None:
                request_ids[seq.request.request_id] = None
        return list(request_ids)

    def add(self, request: Request) -> None:
        """Queues a new request. Raises what the policy raises, and ValueError for a key that cannot
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
        """Moves a request from the queue to the batch."""
        self._leave_queue(request)
        insort(self.running, request, key=_by_sort_key)

    def load(self, request: Request) -> None:
        """Moves a request from the queue to the loading ones."""
        self.hold(request, Refused("loading"))
        self._leave_queue(request)
        self.loading.append(request)

    def loaded(self, request: Request) -> None:
        """Moves a loading request back to the queue."""
        self.loading.remove(request)
        self._wait(request, Refused("queue"))

    def hold(self, request: Request, refused: Refused) -> None:
        """Records the reason for which a request waits."""
        if request.waits != refused:
            if request.waits is not None:
                self.waits[request.waits.reason] -= 1
            self.waits[refused.reason] += 1
            request.waits = refused

    def hold_back(self, asked: Iterable[Request], allowed: Iterable[Request]) -> None:
        """Records that the policy holds back the requests of `asked` that are not in `allowed`."""
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
        """Moves a request from the batch back to the queue. The worker drops it."""
        self.running.remove(request)
        self._wait(request, refused)
        for part in request.parts:
            self._drop(part)

    def remove_sequence(self, seq: Sequence) -> None:
        """Removes a sequence that has ended, or a beam that was replaced. The worker drops it."""
        self._drop(seq)
        del self.sequences[seq.seq_id]

    def remove(self, request: Request) -> None:
        """Removes a request whose sequences have all ended."""
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
        """Moves all requests to the queue. The worker drops them, and also what `plans` would have
        dropped."""
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
