"""DraftBudget: how many drafts a step verifies, so that drafts do not cost throughput.

A step of R rows and N drafts takes t(R, N) seconds and yields R tokens, and each draft with the
probability that it and those before it in its row are accepted. The budget maximises tokens per
second, and tells drafters before they draft how many of each row it wants. Where steps without
drafts give more, drafters are not asked for a while, and steps are planned ahead as without a
drafter.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence as Collection
from statistics import median
from typing import NamedTuple

import numpy as np
from msgspec import msgpack

from toolkit_lm.messages import DraftRequest, StepPlan, StepResult
from toolkit_lm.scheduler.request import Request, Sequence

Point = tuple[int, int, float]
"""A measured step: rows, drafts of each row, seconds. -1 drafts: no drafter was asked."""


_PRIOR: list[Point] = [(1, -1, 1.0), (64, -1, 2.0)]
"""Relative times of steps that nobody has measured: few rows read the weights, many compute."""
_UNSEEN = 2
"""Plain steps that one with a drafter takes where none was ever measured. So tries are earned."""
_MOST = 16
"""Positions of a draft with an estimate of their own."""
_FIRST = 0.6
"""Acceptance that is expected of a draft before any was verified."""
_WEIGHT = 4.0
"""Verified drafts of a position for which the position before it counts."""
_RECENT = 7
"""Steps of a cell whose median counts."""
_CALIBRATING = 4
"""Steps without drafts that are measured before drafts at a new number of rows."""
_PROBED = 8
"""Drafts that the first steps of a try verify at most."""
_MARGIN = 1.02
"""Tokens per second with drafts to those without, at least."""
_SHARE = 0.0075
"""Share of the time that tries may cost."""
_STAKE = 1.0
"""Plain steps that a try of one row may cost before they are earned. That of R rows may cost the
square root of R less, as its output varies less."""
_CREDIT = 4.0
"""Plain steps that drafts of one row may earn, so that a few unlucky steps do not end them."""
_PAUSE = 64
"""Least number of steps without drafts between two tries."""
_DOUBLINGS = 3
"""Most doublings of the pause, one for each try in a row that found no gain."""
_OBSERVED = 8
"""Plain steps before a try that are observed."""
_LONGEST_TRY = 200
"""Steps with drafters after which plain steps are measured again."""
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
        self._curves: dict[bool, dict[int, list[tuple[int, float]]]] = {True: {}, False: {}}
        """Measured steps by rows, without drafters and with them."""
        self._measured: dict[tuple[int, int, bool], float] = {}
        """Seconds by the points alone, by rows and drafts: those that were asked for."""
        points = points or _PRIOR
        for rows, drafts, _ in sorted(points):
            # Other processes make a step longer: one that does more, and took less, says so.
            seconds = min(took for size, more, took in points if size >= rows and more >= drafts)
            self._curves[drafts < 0].setdefault(rows, []).append((max(drafts, 0), seconds))
        asked = self._curves[False]
        more_asked = 1 if asked else _UNSEEN
        for rows, [(_, seconds)] in self._curves[True].items():
            curve = asked.setdefault(rows, [(0, more_asked * seconds)])
            if len(curve) == 1:
                # Drafts that were not measured cost what as many rows do.
                more = self._of_points(8 * rows, 0, True) / seconds
                curve.append((curve[0][0] + 7, curve[0][1] * more))
        self._recent: dict[tuple[int, int], deque[float]] = {}
        """Logarithms of what the last steps took to what was measured, by cell."""
        self._errors: dict[tuple[int, int], float] = {}
        """Their medians: a step that was interrupted counts for nothing."""

    def predict(self, rows: int, num_drafts: int, *, plain: bool = False) -> float:
        """Seconds of a step of `rows` that verifies `num_drafts` in all. `plain`: no drafter is
        asked."""
        cell = _cell(rows, num_drafts, plain)
        return self._of_points(rows, num_drafts, plain) * math.exp(self._error(cell))

    def observe(self, rows: int, num_drafts: int, seconds: float, *, plain: bool = False) -> None:
        """Records the duration of a step."""
        cell = _cell(rows, num_drafts, plain)
        recent = self._recent.setdefault(cell, deque(maxlen=_RECENT))
        recent.append(math.log(max(seconds, 1e-9) / self._of_points(rows, num_drafts, plain)))
        self._errors[cell] = median(recent)

    def num_plain(self, rows: int) -> int:
        """Number of plain steps that were observed with about as many rows."""
        return len(self._recent.get(_cell(rows, 0, True), ()))

    def _of_points(self, rows: int, num_drafts: int, plain: bool) -> float:
        place = rows, num_drafts, plain
        if (known := self._measured.get(place)) is not None:
            return known
        curves = self._curves[plain] or self._curves[not plain]
        times = sorted(
            (size, _interpolate(curve, num_drafts / rows)) for size, curve in curves.items()
        )
        return self._measured.setdefault(place, _interpolate(times, rows))

    def _error(self, cell: tuple[int, int]) -> float:
        """That of the nearest cell with one: of as many rows, if there is any."""
        if cell in self._errors:
            return self._errors[cell]
        if not self._errors:
            return 0.0
        size, kind = cell
        nearest = min(self._errors, key=lambda c: (abs(c[0] - size), abs(c[1] - kind), c))
        return self._errors[nearest]


class Acceptance:
    """Estimates the probability that drafts are accepted, by row and position."""

    def __init__(self) -> None:
        self._positions = np.zeros((2, _MOST))
        """Accepted and verified drafts of all rows, by position; older ones count less."""
        self.rows: dict[int, tuple[float, float]] = {}
        """The same by sequence."""

    def observe(self, verified: Collection[tuple[int, int, int]]) -> None:
        """Records a step's verified drafts: sequences, how many of their drafts were tried, and how
        many accepted. Drafts behind a rejected one were not tried."""
        for seq_id, num_tried, right in verified:
            accepted, tried = self.rows.get(seq_id, (0.0, 0.0))
            self.rows[seq_id] = 0.9 * accepted + right, 0.9 * tried + num_tried
        # [2, positions]: drafts that were accepted, and those that were tried.
        counts = np.array(verified).T[:0:-1, :, None] > np.arange(_MOST)
        new = counts.sum(axis=1)
        # Counts of positions that are not tried grow old.
        self._positions *= 0.97 ** new[1] * 0.995 ** (len(verified) - new[1])
        self._positions += new

    def chances(self) -> list[float]:
        """Probability of each position's draft, if those before it are accepted."""
        chance = _FIRST
        return [
            chance := (_WEIGHT * chance + accepted) / (_WEIGHT + tried)
            for accepted, tried in self._positions.T.tolist()
        ]

    def ranked(
        self, seq_ids: Collection[int], most: Collection[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ranks the drafts that R sequences might have, `most` of each: expected tokens of each
        draft, falling, and the index of its sequence. A draft yields a token if it and all before
        it are accepted, so that those of a sequence keep their order."""
        known = np.array([self.rows.get(seq_id, (0.0, 0.0)) for seq_id in seq_ids])
        # All rows count for six drafts of a row.
        chances = (6 * np.array(self.chances()) + known[:, :1]) / (6 + known[:, 1:])
        at, of = np.nonzero(np.arange(_MOST)[:, None] < most)
        gains = chances.cumprod(axis=1)[of, at]
        order = np.argsort(-gains, kind="stable")
        return gains[order], of[order]

    def age(self, limits: Mapping[int, int]) -> None:
        """Forgets sequences without a limit. What is known of others that verify nothing grows
        old."""
        self.rows = {
            key: known if limits[key] else (known[0] * 0.97, known[1] * 0.97)
            for key, known in self.rows.items()
            if key in limits
        }


class DraftBudget:
    """Decides for each step whether drafters are asked, and for how many drafts.

    Drafters are tried, and asked on while that gives more tokens per second than plain steps. What
    tries cost in all stays a small share of the time.
    """

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
        self.is_asking = True
        """Drafters are asked in this step."""
        self.holds = False
        """No step is planned before the results of this one."""
        self.limits: dict[int, int] = {}
        """Most drafts that drafters are asked for in this step, by seq_id."""
        self._chooses = not all_drafts
        self._rests = facts.rests and not all_drafts
        self._is_trying = not self._rests
        """Drafters are asked, where a request wants drafts."""
        self._forced: set[int] = set()
        """Sequences whose drafts must follow."""
        self._overlaps = overlaps
        self._left = _CALIBRATING
        """Least number of steps until drafters are tried."""
        self._debt = 0.0
        """Plain steps that tries have cost, and that plain steps have not earned yet."""
        self._failures = 0
        """Tries in a row that found no gain."""
        self._stake = _STAKE
        """Debt at which a try ends."""
        self._num_tried = 0
        """Steps of the last try."""

    def begin_step(self, running: Collection[Request]) -> None:
        """Decides on a step before it is planned."""
        if self._overlaps and self._left > 0 and not (self.is_asking or self._is_trying):
            for request in running:
                request.needs_tokens = request.search is not None
            # A plan has the last ones.
            self.limits = {}
            return
        sequences = [seq for request in running for seq in request.unfinished]
        self.limits = {
            seq.seq_id: 0 if seq.request.search else seq.request.max_asked for seq in sequences
        }
        wanted = [seq for seq in sequences if self.limits[seq.seq_id]]
        if wanted and self._chooses:
            self._choose(wanted, len(sequences))
        # A request that is admitted now may want drafts.
        wants = bool(wanted or not sequences)
        self.is_asking = not self.facts.rests or (self._is_trying and wants)
        self.holds = self._overlaps and self.is_asking
        for request in running if self._overlaps and self._chooses else ():
            request.needs_tokens = self.is_asking or request.search is not None
        for seq in () if self.is_asking else sequences:
            # Drafts that must follow are tokens like any other.
            if seq.drafts and seq.seq_id not in self._forced:
                seq.drafts = []

    def observe(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Records a step's drafts, and the time since the one before. Times of steps that compute
        prompts are left out."""
        rows = len(plan.scheduled)
        num_drafts = sum(row.num_drafts for row in plan.scheduled)
        if self._chooses and (
            verified := [
                (row.seq_id, min(row.num_drafts, len(drawn)), len(drawn) - 1)
                for row, drawn in zip(plan.scheduled, result.token_ids, strict=True)
                if row.num_drafts and drawn and row.seq_id not in self._forced
            ]
        ):
            self.acceptance.observe(verified)
        self._forced = {*result.forced}
        if not self._chooses or not rows or plan.num_tokens != rows + num_drafts or plan.new:
            return
        if not plan.asks_drafters:
            if not num_drafts and self._left <= _OBSERVED:
                self.times.observe(rows, 0, seconds, plain=True)
            self._left -= 1
            self._debt -= _SHARE
            return
        if self._num_tried:
            self.times.observe(rows, num_drafts, seconds)
        # Estimates: a step that other processes interrupt says nothing of drafters.
        taken = self.times.predict(rows, num_drafts)
        plain = self.times.predict(rows, 0, plain=True)
        lost = taken / plain - sum(map(len, result.token_ids)) / rows
        if not self._num_tried:
            # Drafters may have read what they had missed. That is paid, and is no part of the try.
            more = max(0.0, seconds - taken) / plain
            self._stake += more
            lost += more
        self._debt = max(min(self._debt, -_CREDIT / math.sqrt(rows)), self._debt + lost)
        self._num_tried += 1
        if self._num_tried == _PAUSE:
            self._failures = 0
        if self._debt > self._stake and self._rests:
            self._fail()

    def add(self, request: Request) -> None:
        """Sets the limit of a request that is queued."""
        if (raw := request.inputs.parts.get("drafter")) is not None:
            asked = msgpack.decode(raw, type=DraftRequest).max_draft_tokens
            if asked is not None:
                request.max_asked = asked

    def _choose(self, wanted: Collection[Sequence], rows: int) -> None:
        """Begins or ends a try, and limits the drafts of the sequences that may have some."""
        begins = self._rests and not self._is_trying
        if begins and self._left > 0:
            return
        if self._rests and (
            self.times.num_plain(rows) < _CALIBRATING
            or (self._num_tried >= _LONGEST_TRY and not begins)
        ):
            self._rest(_CALIBRATING)
            return
        seq_ids = [seq.seq_id for seq in wanted]
        gains, of = self.acceptance.ranked(seq_ids, [seq.request.max_asked for seq in wanted])
        count = self._num_best(gains, rows)
        probed = min(len(wanted), _PROBED)
        if begins and not self._begin(rows, probed, count):
            return
        if (self._num_tried - 1) * probed < 2 or (self._rests and not count):
            # Few drafts say little: what was lost by them ends a try. Its first step has none.
            count = probed
        self.limits = dict.fromkeys(self.limits, 0)
        # A row's gains fall, so that the best of all are the first of each row.
        counts = np.bincount(of[:count], minlength=len(wanted))
        self.limits.update(zip(seq_ids, counts.tolist(), strict=True))
        self.acceptance.age(self.limits)

    def _begin(self, rows: int, probed: int, count: int) -> bool:
        """Begins a try that verifies `probed` drafts, unless it is too early. `count`: best number
        by the estimates. If they say no, only every other time that is put to the test, and only
        once plain steps have earned what it costs."""
        if not count and self._failures % 2 == 0:
            self._fail()
            return False
        # The first step asks, and the second verifies what may all be wrong.
        plain = self.times.predict(rows, 0, plain=True)
        price = sum(max(0.0, self.times.predict(rows, n) / plain - 1) for n in (0, probed))
        self._stake = _STAKE / math.sqrt(rows)
        missing = self._debt + price - self._stake * bool(count)
        # More than that was not earned for this try.
        self._debt = max(self._debt, -2 * price)
        self._rest(math.ceil(missing / _SHARE))
        self._num_tried = 0
        self._is_trying = missing <= 0
        return self._is_trying

    def _fail(self) -> None:
        """Rests, the longer the more often no gain was found."""
        self._rest(_PAUSE << min(self._failures, _DOUBLINGS))
        self._failures += 1

    def _rest(self, num_steps: int) -> None:
        self._is_trying = False
        self._left = num_steps

    def _num_best(self, gains: np.ndarray, rows: int) -> int:
        """Number of the first drafts that give the most tokens per second."""
        best = 0
        rate = rows / self.times.predict(rows, 0, plain=self._rests)
        if self._rests:
            rate *= _MARGIN
        totals = gains.cumsum().tolist()
        for count in _counts(len(totals))[1:]:
            found = (rows + totals[count - 1]) / self.times.predict(rows, count)
            if found > rate:
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
    after = min(bisect_left(points, (at,)), len(points) - 1)
    if not after:
        return points[0][1]
    x0, y0 = points[after - 1]
    x1, y1 = points[after]
    y = y0 + (at - x0) * (y1 - y0) / (x1 - x0)
    return y if at <= x1 else max(y, y1)
