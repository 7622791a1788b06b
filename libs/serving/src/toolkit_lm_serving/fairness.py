"""The scheduling policy "fair": turns between clients, for what waits and for what runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from toolkit_lm.scheduler import SchedulingPolicy

from toolkit_lm_serving import CLIENT

if TYPE_CHECKING:
    from toolkit_lm.config import SchedulerConfig
    from toolkit_lm.messages import StepPlan
    from toolkit_lm.scheduler import Request

_MANY = 10_000
"""Most clients that are remembered."""
_GUESS = 16
_FEWEST = 4
_MOST = 2048
"""Most rows that cost as much as a step's base. `_FEWEST` are the fewest, and `_GUESS` is the value
before any measurement."""
_RISE = 1.05
"""Factor by which the cheapest known step rises with each dearer one. So rows that cost more, as
with log probabilities, soon count."""
_FADE = 1.002
"""Factor by which a dearer step counts for less with each step that its estimate has cut."""
_SLOWER = 1.25
"""Longest time of a shared step, relative to one in which all clients want as little as the
least."""
_RECENT = 1.0
"""Seconds of steps for which a client is expected back. Its next request waits for the steps in
flight, so these stay short meanwhile."""
_SHORT = 16
"""Length of a short step of rows, in steps' bases. So little of it is base that clients lose less
than a tenth of their throughput."""
_LOOKED_AT = 16
"""Waiting requests of a client that may be admitted in a step."""
_KEPT_FREE = 32
"""Places per place that is kept for clients who run nothing yet."""

_BETWEEN = 8
"""Steps from one reserved step to the next."""


class FairPolicy(SchedulingPolicy):
    """One client's flood delays its own requests first.

    - **Waiting requests** are ordered by start-time fair queueing (Goyal, Vin and Cheng 1996), by
      tokens. Each client has a clock. A request moves it on by the tokens that it may compute.
      The request's key is the clock's time before. A clock that was left behind begins with the
      requests that are served now, so that no client saves up turns.
    - **Places**: each client leaves some free. Where there is no place or no block left, the client
      that runs most sequences gives way. Its last request is preempted, once in its life, for a
      client that would run fewer.
    - **A step** is shared by max-min fairness. It takes at most about 1.25 times as long as if all
      clients wanted as little as the least, and at most `step_time_target`. Rows without a share
      sit the step out, and keep their blocks. Fractions of a token count in the next step: a
      deficit round robin (Shreedhar and Varghese 1995).
    - **A step of a client alone** is short, while another one was served in the last second: its
      next request would wait for the steps in flight.
    - **What cannot be cut**, such as a beam search's rows, is computed once its client's shares
      have come to its length. A step exceeds its bound for at most one of these. Where requests
      before it leave too little of the step, they leave room for it in the next one.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._num_places = config.max_num_seqs - config.max_num_seqs // _KEPT_FREE
        self._token_budget = config.token_budget
        self._target = config.step_time_target
        self._now = 0.0
        """The key of the latest request that runs, or ran."""
        self._clocks: dict[str, float] = {}
        self._held: Counter[str] = Counter()
        """Running sequences of each client."""
        self._running: set[int] = set()
        """Numbers of the running requests."""
        self._left: dict[str, int] | None = None
        """Tokens that each client may still compute in the planned step. None: as many as it
        wants."""
        self._saved: dict[str, float] = {}
        """Tokens that each client could not use in the step before, because its prompt cannot be
        cut, or its share was no whole number."""
        self._shares: dict[str, int] = {}
        """Each client's share of the planned step alone, rounded up."""
        self._exceeds = False
        """The planned step has something that its client has saved up for."""
        self._late: dict[str, None] = {}
        """Clients that had saved enough to exceed a step's bound, but another did."""
        self._turn: str | None = None
        """The client that may exceed the planned step's bound. None: whoever comes first."""
        self._owed: int | None = None
        """Number of the request that the next step, or the planned one, leaves room for."""
        self._reserved = 0
        """Tokens that the planned step leaves for the request `_owed`."""
        self._rest = 0
        """Steps until room may be left again."""
        self._computes = True
        """The step that is planned, or was planned last, computes something."""
        self._cost = StepCost()
        self._cost_of_all = StepCost(all_steps=True)
        """Of steps that compute prompts or drafts, too. Only the target asks it."""
        self._drafts = bool(config.drafter)
        self._busy = 0.0
        """Seconds of all steps so far."""
        self._shared = -math.inf
        """Seconds of all steps when the clients were several last, or others than before."""
        self._present: set[str] = set()
        """The clients that had requests last."""

    def key(self, request: Request) -> tuple[float, ...]:
        client = _client(request)
        start = max(self._now, self._clocks.pop(client, 0.0))
        if len(self._clocks) >= _MANY:
            # Who has not come for the longest time.
            del self._clocks[next(iter(self._clocks))]
        self._clocks[client] = (
            start
            + request.num_prompt_tokens
            + request.max_output_tokens * request.params.num_sequences
        )
        return (start,)

    def begin_step(
        self, running: Sequence[Request], waiting: Sequence[Request]
    ) -> Sequence[Request]:
        if running:
            self._now = max(self._now, running[-1].sort_key[0])
        self._held = _rows_by_client(running)
        self._running = {request.number for request in running}
        saved, self._left, self._saved = self._saved, None, {}
        self._exceeds = False
        waiting = self._with_places(waiting)
        self._reserve(running, waiting)
        # Where a step has computed nothing, the next one is not shared: somebody must get on.
        idle, self._computes = not self._computes, False
        clients = {*self._held, *map(_client, waiting)}
        if len(clients) > 1 or (clients and self._present and clients != self._present):
            self._shared = self._busy
        self._present = clients or self._present
        if not idle and (self._expects_others or self._target is not None):
            self._share(running, waiting, saved)
        return waiting

    @property
    def _expects_others(self) -> bool:
        """Whether a client beside the present one has requests, or had some a little while ago."""
        return self._busy < self._shared + _RECENT

    def _reserve(self, running: Sequence[Request], waiting: Sequence[Request]) -> None:
        """Reserves tokens of a step for the request that is owed them."""
        self._reserved, self._rest = 0, max(0, self._rest - 1)
        if self._owed is not None and self._rest == 0:
            self._reserved = next(
                (
                    request.least_tokens
                    for request in (*running, *waiting)
                    if request.number == self._owed
                ),
                0,
            )
            self._rest = _BETWEEN
        if not self._reserved:
            self._owed = None

    def _with_places(self, waiting: Sequence[Request]) -> list[Request]:
        """The waiting requests whose clients have places for them. Only each client's first ones
        are looked at, because there may be thousands."""
        seen: Counter[str] = Counter()
        found = []
        for request in waiting:
            client = _client(request)
            seen[client] += 1
            if seen[client] <= _LOOKED_AT and self._has_place(request, client):
                found.append(request)
        return found

    def _has_place(self, request: Request, client: str) -> bool:
        held = self._held[client]
        return not held or held + request.num_rows <= self._num_places

    def _share(
        self, running: Sequence[Request], waiting: Sequence[Request], saved: dict[str, float]
    ) -> None:
        """Splits a step between clients, the one that wants least first."""
        wanted: Counter[str] = Counter()
        for request in (*running, *waiting):
            wanted[_client(request)] += request.num_wanted_tokens
        clients = sorted(wanted, key=wanted.__getitem__)
        fewest = wanted[clients[0]] if clients else 0
        num_rows = sum(self._held.values())
        left = float(self._bound(len(clients), fewest, prompts=wanted.total() > num_rows))
        if wanted.total() <= left:
            self._late = {}
            return
        self._late = {client: None for client in self._late if client in wanted}
        self._turn = next(iter(self._late), None)
        if self._turn is not None:
            del self._late[self._turn]
        self._left = {}
        self._shares = {}
        for position, client in enumerate(clients):
            share = min(wanted[client], left / (len(clients) - position))
            left -= share
            self._shares[client] = math.ceil(share)
            credit = share + saved.get(client, 0)
            self._left[client] = max(0, int(credit))
            self._saved[client] = credit - self._left[client]
        # Whole tokens of what is left of the shares. Sums of fractions may lack a little.
        spare = int(sum(self._saved.values()) + 1e-6)
        for client in sorted(clients, key=lambda client: -self._saved[client])[:spare]:
            self._left[client] += 1
            self._saved[client] -= 1

    def _bound(self, num_clients: int, least: int, *, prompts: bool) -> int:
        """Tokens of a step for so many clients, of which one wants the least. `prompts`: it
        computes some."""
        bound = self._token_budget
        if num_clients > 1:
            shared = _SLOWER * num_clients * least
            bound = min(bound, int(shared + (_SLOWER - 1) * self._cost.num_tokens_of_base))
        elif self._expects_others:
            bound = min(bound, _SHORT * self._cost.num_tokens_of_base * (4 if prompts else 1))
        if self._target is not None:
            cost = self._cost_of_all if prompts or self._drafts else self._cost
            within = cost.num_tokens_within(self._target)
            if within < bound:
                bound = within
                cost.fade(within, self._target)
        return bound

    def grant(self, request: Request, budget: int) -> int:
        client = _client(request)
        waits = request.number not in self._running
        if waits and not self._has_place(request, client):
            return 0
        granted = self._granted(request, client, budget)
        self._computes = self._computes or granted > 0
        if waits and granted:
            self._held[client] += request.num_rows
        return granted

    def _granted(self, request: Request, client: str, budget: int) -> int:
        if self._reserved and request.number == self._owed:
            # Its shares have come to so much already.
            self._owed = None
            self._reserved = 0
            if self._left is not None:
                self._left[client] = 0
            return budget
        budget = max(0, budget - self._reserved)
        if self._owed is None and self._left_of(client) >= request.least_tokens > budget:
            self._owed = request.number
        return budget if self._left is None else self._charge_share(request, client, budget)

    def _left_of(self, client: str) -> float:
        return math.inf if self._left is None else self._left.get(client, 0)

    def _charge_share(self, request: Request, client: str, budget: int) -> int:
        assert self._left is not None, "the step is shared"
        left = self._left.get(client, 0)
        granted = min(left, request.num_wanted_tokens, budget)
        least = request.least_tokens
        usual = self._shares.get(client, 0) + 1
        if least <= usual:
            granted = min(granted, usual)
        if granted < least or (least > usual and not self._may_exceed(client)):
            saved = min(left, least)
            self._saved[client] = self._saved.get(client, 0) + saved
            self._left[client] = left - saved
            return 0
        self._left[client] = left - granted
        return granted

    def _may_exceed(self, client: str) -> bool:
        """Whether a client may compute what it has saved up for. A step has that of a single
        client, the one whose turn it is."""
        if not self._exceeds and self._turn in (None, client):
            self._exceeds = True
            return True
        self._late[client] = None
        return False

    def overtakes(self, request: Request, other: Request) -> bool:
        return self._held[_client(request)] + request.num_rows <= self._held[_client(other)]

    def gives_way(self, request: Request, running: Sequence[Request]) -> Request | None:
        waits = request is not running[0]
        client = _client(request)
        rows = request.num_rows if waits else 0
        if waits and max(self._held.values()) <= self._held[client] + rows:
            return None
        held = _rows_by_client(running)
        # The last of the client that holds most.
        victim = max(
            reversed(running),
            key=lambda request: 0 if waits and request.gave_way else held[_client(request)],
        )
        if waits and (victim.gave_way or held[_client(victim)] <= held[client] + rows):
            return None
        return victim

    def observe(self, plan: StepPlan, seconds: float) -> None:
        self._busy += seconds
        self._cost.observe(plan, seconds)
        if self._target is not None:
            self._cost_of_all.observe(plan, seconds)


class StepCost:
    """The time of a decode step by its rows: base + rows * each. The estimate comes from the
    cheapest steps of few and of many rows."""

    def __init__(self, *, all_steps: bool = False) -> None:
        """`all_steps`: steps that compute more than a token of each row count too, by tokens."""
        self._all_steps = all_steps
        self._cheapest: dict[int, tuple[int, float]] = {}
        """Rows and seconds of the cheapest step, by the number of the rows' binary digits."""

    def observe(self, plan: StepPlan, seconds: float) -> None:
        rows = plan.num_tokens if self._all_steps else len(plan.scheduled)
        if rows == 0 or plan.num_tokens != rows:
            return
        size = rows.bit_length()
        before = self._cheapest.get(size, (rows, math.inf))
        # A size that was cheap long ago may not be cheap any more.
        self._cheapest[size] = (
            (rows, seconds) if seconds <= _RISE * before[1] else (before[0], _RISE * before[1])
        )

    @property
    def num_tokens_of_base(self) -> int:
        """Rows whose own time is as long as the base. A guess until steps of few rows and of many
        have been seen."""
        if len(self._cheapest) < 2:
            return _GUESS
        few = self._cheapest[min(self._cheapest)]
        many = self._cheapest[max(self._cheapest)]
        if few[0] > _GUESS or many[0] < 2 * few[0]:
            return _GUESS
        each = max((many[1] - few[1]) / (many[0] - few[0]), 1e-9)
        return int(min(max(few[1] / each - few[0], _FEWEST), _MOST))

    def num_tokens_within(self, seconds: float) -> int:
        """Tokens of a step of at most so many seconds, at least one: interpolated between known
        steps. Beyond the largest known one it is twice that, and at least `_GUESS`, so that larger
        ones become known."""
        rows = 0
        before = 0.0
        for more, taken in sorted(self._cheapest.values()):
            if taken > seconds:
                return max(1, rows + round((more - rows) * (seconds - before) / (taken - before)))
            rows = more
            before = taken
        return max(_GUESS, 2 * rows)

    def fade(self, rows: int, seconds: float) -> None:
        """A step was cut to so many rows by the times of longer ones, which nothing would correct
        otherwise: they fall, as far as a tenth over the seconds that were aimed at."""
        for size, (most, taken) in self._cheapest.items():
            if size > rows.bit_length():
                self._cheapest[size] = (most, min(taken, max(taken / _FADE, 1.1 * seconds)))


def _client(request: Request) -> str:
    client: str = request.context.get(CLIENT, "")
    return client


def _rows_by_client(requests: Sequence[Request]) -> Counter[str]:
    held: Counter[str] = Counter()
    for request in requests:
        held[_client(request)] += request.num_rows
    return held
