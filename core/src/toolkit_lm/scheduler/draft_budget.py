"""DraftBudget: how many drafts a step verifies, so that drafts do not cost throughput.

A step of R rows and N drafts takes t(R, N) seconds and yields R tokens, and each draft with the
probability that it and those before it in its row are accepted. The budget maximises tokens per
second. Where steps without drafts give more, drafters are not asked for a while, and steps are
planned ahead as without a drafter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence as Collection
from typing import NamedTuple

from toolkit_lm.messages import ScheduledSequence, StepPlan
from toolkit_lm.scheduler.request import Request, Sequence

Point = tuple[int, int, float]
"""A measured step: rows, drafts of each row, seconds."""

_PRIOR: list[Point] = [(1, 0, 1.0), (1, 8, 1.25), (64, 0, 2.0), (64, 8, 6.0)]
"""Relative times of steps that nobody has measured: few rows read the weights, many compute."""
_MOST = 16
"""Positions of a draft with an estimate of their own."""
_FIRST = 0.6
"""Acceptance that is expected of a draft before any was verified."""
_CALIBRATING = 4
"""Steps without drafts that are measured before drafts at a new number of rows."""
_PROBING = 5
"""Steps with drafts that are compared with steps without."""
_SHORTEST_PAUSE = 160
_LONGEST_PAUSE = 640
"""Steps without drafts between two tries."""
_PLAIN = -1
"""Class of steps for which no drafter is asked. Others: 0, no drafts; and by drafts of a row."""


class DraftingFacts(NamedTuple):
    """Facts of the worker's drafters."""

    step_times: list[Point] = []
    """Decode steps that were measured at the start."""
    rests: bool = True
    """Steps may go by for which no drafter is asked."""


_UNKNOWN = DraftingFacts()


class StepTimes:
    """Estimates the time of a decode step: measured points, corrected by the steps that run."""

    def __init__(self, points: Collection[Point] = ()) -> None:
        points = points or _PRIOR
        self._curves: dict[int, list[tuple[int, float]]] = {}
        for rows, drafts, seconds in sorted(points):
            self._curves.setdefault(rows, []).append((drafts, seconds))
        self._errors: dict[tuple[int, int], tuple[float, int]] = {}
        """Logarithm of what steps took to what was measured, and number of steps, by cell."""

    def predict(self, rows: int, num_drafts: int, *, plain: bool = False) -> float:
        """Seconds of a step of `rows` that verifies `num_drafts` in all. `plain`: no drafter is
        asked."""
        cell = _cell(rows, num_drafts, plain)
        return self._measured(rows, num_drafts) * math.exp(self._error(cell))

    def observe(self, rows: int, num_drafts: int, seconds: float, *, plain: bool = False) -> None:
        """Records the duration of a step."""
        cell = _cell(rows, num_drafts, plain)
        found = math.log(max(seconds, 1e-9) / self._measured(rows, num_drafts))
        error, count = self._errors.get(cell, (found, 0))
        # One step that was interrupted does not count for more than a tenth.
        change = min(max(found - error, -0.5), 0.5)
        self._errors[cell] = error + change * max(0.1, 1 / (count + 1)), count + 1

    def num_plain(self, rows: int) -> int:
        """Number of plain steps that were observed with about as many rows."""
        return self._errors.get(_cell(rows, 0, True), (0.0, 0))[1]

    def _measured(self, rows: int, num_drafts: int) -> float:
        each = num_drafts / rows
        sizes = [*self._curves]
        times = [_interpolate(self._curves[size], each) for size in sizes]
        logs = [math.log2(size) for size in sizes]
        return _interpolate(list(zip(logs, times, strict=True)), math.log2(rows))

    def _error(self, cell: tuple[int, int]) -> float:
        """That of the nearest cell with one: of as many rows, if there is any."""
        if cell in self._errors:
            return self._errors[cell][0]
        if not self._errors:
            return 0.0
        size, kind = cell
        nearest = min(self._errors, key=lambda c: (abs(c[0] - size), abs(c[1] - kind), c))
        return self._errors[nearest][0]


class Acceptance:
    """Estimates the probability that drafts are accepted, by row and position."""

    def __init__(self) -> None:
        self._positions = [[4 * _FIRST, 4.0] for _ in range(_MOST)]
        """Accepted and verified drafts of all rows, by position; older ones count less."""
        self.rows: dict[int, list[float]] = {}
        """The same by sequence."""

    def observe(self, seq_id: int, num_drafts: int, num_accepted: int) -> None:
        """Records a verified draft."""
        row = self.rows.setdefault(seq_id, [0.0, 0.0])
        row[0] *= 0.8
        row[1] *= 0.8
        # Drafts behind a rejected one were not tried.
        for position in range(min(num_drafts, num_accepted + 1)):
            is_accepted = position < num_accepted
            row[0] += is_accepted
            row[1] += 1
            if position < _MOST:
                counts = self._positions[position]
                counts[0] = counts[0] * 0.97 + is_accepted
                counts[1] = counts[1] * 0.97 + 1

    def gains(self, seq_id: int, num_drafts: int) -> list[float]:
        """Expected tokens of each draft of a row: the probability that it and all before it are
        accepted."""
        accepted, verified = self.rows.get(seq_id, (0.0, 0.0))
        gains = []
        gain = 1.0
        for position in range(num_drafts):
            known, tried = self._positions[min(position, _MOST - 1)]
            gain *= (2 * known / tried + accepted) / (2 + verified)
            gains.append(gain)
        return gains

    def rest(self, seq_id: int) -> None:
        """A row has verified nothing: what is known of it grows old."""
        if (row := self.rows.get(seq_id)) is not None:
            row[0] *= 0.97
            row[1] *= 0.97

    def retain(self, seq_ids: Iterable[int]) -> None:
        """Forgets other sequences."""
        self.rows = {key: self.rows[key] for key in seq_ids if key in self.rows}


class DraftBudget:
    """Decides for each step whether drafters are asked, and how many drafts are verified."""

    def __init__(
        self,
        facts: DraftingFacts = _UNKNOWN,
        *,
        all_drafts: bool = False,
        overlaps: bool = True,
    ) -> None:
        """`all_drafts`: each draft is verified. `overlaps`: sampled tokens stay on the worker if no
        drafts follow."""
        self.facts = facts
        self.times = StepTimes(facts.step_times)
        self.acceptance = Acceptance()
        self._rests = facts.rests
        self.is_asking = all_drafts or not facts.rests
        """Drafters are asked in this step."""
        self._all = all_drafts
        self._forced: set[int] = set()
        """Sequences whose drafts must follow."""
        self._overlaps = overlaps
        self._left = _CALIBRATING
        """Steps until the other mode is tried, or compared."""
        self._pause = _SHORTEST_PAUSE
        self._num_tried = 0
        self._tokens = 0.0
        self._seconds = 0.0
        """Tokens and seconds of the last steps for which drafters were asked."""

    def begin_step(self, running: Collection[Request]) -> None:
        """Cuts the drafts of running requests, before a step is planned."""
        if self._all:
            return
        if len(self.acceptance.rows) > 4 * len(running) + 64:
            known = {seq_id for request in running for seq_id in request.seq_ids}
            self.acceptance.retain(known)
            self._forced &= known
        sequences = [seq for request in running for seq in request.unfinished]
        if not self.is_asking and self._left <= 0 and sequences:
            self._ask()
        elif (
            self._rests
            and self.is_asking
            and self.times.num_plain(len(sequences) or 1) < _CALIBRATING
        ):
            self._rest(_CALIBRATING)
        if self._overlaps:
            for request in running:
                request.needs_tokens = self.is_asking or request.search is not None
        # Drafts that must follow are tokens like any other.
        drafting = [seq for seq in sequences if seq.drafts and seq.seq_id not in self._forced]
        if self.is_asking and drafting:
            self._cut(drafting, len(sequences))
        elif not self.is_asking:
            for seq in drafting:
                seq.drafts = []

    def observe(self, plan: StepPlan, num_output_tokens: int, seconds: float) -> None:
        """Records a step's duration. Steps that compute prompts are left out."""
        if self._all or not plan.scheduled:
            return
        rows = len(plan.scheduled)
        num_drafts = sum(row.num_drafts for row in plan.scheduled)
        if plan.num_tokens != rows + num_drafts or plan.new or plan.encoders:
            return
        if not plan.asks_drafters:
            if not num_drafts:
                self.times.observe(rows, 0, seconds, plain=True)
            self._left -= not self.is_asking
            return
        self.times.observe(rows, num_drafts, seconds)
        self._num_tried += 1
        self._tokens = self._tokens * 0.9 + num_output_tokens
        self._seconds = self._seconds * 0.9 + seconds
        self._compare(rows)

    def update(self, row: ScheduledSequence, num_accepted: int, *, forced: bool) -> None:
        """Records how many of a row's drafts were accepted. `forced`: the next drafts must
        follow."""
        if row.num_drafts and row.seq_id not in self._forced:
            self.acceptance.observe(row.seq_id, row.num_drafts, num_accepted)
        if forced:
            self._forced.add(row.seq_id)
        else:
            self._forced.discard(row.seq_id)

    def _ask(self) -> None:
        self.is_asking = True
        self._num_tried = 0
        self._tokens = self._seconds = 0.0

    def _rest(self, num_steps: int) -> None:
        self.is_asking = False
        self._left = num_steps

    def _compare(self, rows: int) -> None:
        """Stops asking if steps without drafts give more tokens per second."""
        if not (self._rests and self.is_asking) or self._num_tried < _PROBING:
            return
        plain = rows / self.times.predict(rows, 0, plain=True)
        if self._tokens / self._seconds >= plain:
            self._pause = _SHORTEST_PAUSE
        else:
            self._rest(self._pause)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _cut(self, drafting: Collection[Sequence], rows: int) -> None:
        """Keeps the drafts that are expected to give the most tokens per second."""
        gains = [self.acceptance.gains(seq.seq_id, len(seq.drafts)) for seq in drafting]
        ranked = sorted(
            (-gain, i, at) for i, row in enumerate(gains) for at, gain in enumerate(row)
        )
        # A row's gains fall, so that the best of all are the first of each row.
        best = self._num_best(ranked, rows, len(drafting) if self._num_tried < 2 else 0)
        kept = [0] * len(drafting)
        for _, i, _ in ranked[:best]:
            kept[i] += 1
        for seq, count in zip(drafting, kept, strict=True):
            del seq.drafts[count:]
            if not count:
                self.acceptance.rest(seq.seq_id)

    def _num_best(self, ranked: Collection[tuple[float, int, int]], rows: int, least: int) -> int:
        """`least`: number of drafts that a try verifies at least."""
        best = least
        rate = 0.0
        expected = float(rows)
        size = 0
        for count in _counts(len(ranked)):
            expected -= sum(negative for negative, _, _ in ranked[size:count])
            size = count
            if count >= least and (found := expected / self.times.predict(rows, count)) > rate:
                best = count
                rate = found
        return best


def _counts(most: int) -> list[int]:
    """Numbers of drafts that are compared: all small ones, then those a quarter apart."""
    counts = [0]
    while counts[-1] < most:
        counts.append(min(most, counts[-1] + max(1, counts[-1] // 4)))
    return counts


def _cell(rows: int, num_drafts: int, plain: bool) -> tuple[int, int]:
    """Cell of a step: by the size of the batch, and the drafts of a row."""
    kind = 0
    if plain:
        kind = _PLAIN
    elif num_drafts:
        kind = 1 + max(0, math.ceil(math.log2(num_drafts / rows)))
    return round(2 * math.log2(rows)), kind


def _interpolate(points: Collection[tuple[float, float]], at: float) -> float:
    """Piecewise linear through points in rising order, and on beyond the last one."""
    if len(points) == 1 or at <= points[0][0]:
        return points[0][1]
    after = next((i for i, (x, _) in enumerate(points) if x >= at), len(points) - 1)
    x0, y0 = points[after - 1]
    x1, y1 = points[after]
    y = y0 + (at - x0) * (y1 - y0) / (x1 - x0)
    return y if at <= x1 else max(y, y1)
