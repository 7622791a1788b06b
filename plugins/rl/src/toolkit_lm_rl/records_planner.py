"""Engine half of records: keeps the rows of each request until its sequences end."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import numpy as np
from msgspec import Raw, msgpack
from toolkit_lm.config import VllmConfig
from toolkit_lm.messages import Array, StepPlan
from toolkit_lm.scheduler import Planner, Request, Sequence

from toolkit_lm_rl.records import HIDDEN_STATES, MIB, ROUTED_EXPERTS, Facts, Rows, Wanted

_FEWEST = 64
"""Rows that a table has room for at first."""


class Table:
    """Rows from one position on. Those that nobody has written are NaN, or -1."""

    def __init__(self, start: int, facts: Facts) -> None:
        self._start = start
        self._facts = facts
        self._values = self._empty(0)
        self.end = start
        """The position after the last row."""

    def _empty(self, rows: int) -> np.ndarray:
        fill = np.nan if self._facts.dtype.startswith("float") else -1
        return np.full((rows, *self._facts.shape), fill, self._facts.dtype)

    def write(self, first: int, values: np.ndarray) -> None:
        """Writes rows [n, layers, width] from a position on. Earlier ones there are replaced."""
        if first < self._start:
            values = values[self._start - first :]
            first = self._start
        if not len(values):
            return
        begin = first - self._start
        end = begin + len(values)
        if end > len(self._values):
            more = max(end - len(self._values), len(self._values), _FEWEST)
            self._values = np.concatenate((self._values, self._empty(more)))
        self._values[begin:end] = values
        self.end = max(self.end, first + len(values))

    def rows(self, end: int) -> np.ndarray:
        """The rows up to a position."""
        return self._values[: max(min(end, self.end) - self._start, 0)]


class Kept:
    """Rows of one request. Its sequences share those of the prompt."""

    def __init__(self, wanted: Wanted, num_prompt: int, facts: Facts) -> None:
        self._wanted = wanted
        self._num_prompt = num_prompt
        self._facts = facts
        self._prompt = Table(wanted.start, facts)
        self._outputs: dict[int, Table] = {}

    def write(self, seq: Sequence, first: int, values: np.ndarray) -> None:
        """Writes rows of a sequence from a position on."""
        cut = max(self._num_prompt - first, 0)
        self._prompt.write(first, values[:cut])
        if cut < len(values):
            self._output(seq).write(first + cut, values[cut:])

    def _output(self, seq: Sequence) -> Table:
        start = max(self._num_prompt, self._wanted.start)
        return self._outputs.setdefault(seq.index, Table(start, self._facts))

    def array(self, seq: Sequence) -> Array:
        """Rows [tokens, layers, width] of the sequence's tokens that were computed."""
        # The last token is sampled, and never computed. Rows of rejected drafts lie behind it.
        end = min(len(seq.token_ids) - 1, self._wanted.end)
        tables = (self._prompt.rows(min(end, self._num_prompt)), self._output(seq).rows(end))
        return Array.of(np.concatenate(tables))


class _RecordsPlanner(Planner):
    """Keeps the rows of requests that wait for others in memory of a limited size."""

    name: ClassVar[str]

    def __init__(self, config: VllmConfig, facts: Raw, *, options: Any) -> None:
        self._facts = msgpack.decode(facts, type=Facts)
        self._most = int(options.recorded_mib * MIB)
        self._kept: dict[str, tuple[Kept, int]] = {}
        """Rows of each request, and the bytes that they may need."""
        self._held = 0

    def _wanted(self, request: Request) -> Wanted | None:
        share = request.inputs.parts.get(self.name)
        return None if share is None else msgpack.decode(share, type=Wanted)

    def _need(self, request: Request, wanted: Wanted) -> int:
        prompt = min(wanted.end, request.num_prompt_tokens) - wanted.start
        outputs = request.max_output_tokens if wanted.end > request.num_prompt_tokens else 0
        rows = max(prompt, 0) + outputs * len(request.sequences)
        layers, width = self._facts.shape
        return rows * layers * width * np.dtype(self._facts.dtype).itemsize

    def may_begin(self, request: Request, tokens: object) -> str | None:
        wanted = self._wanted(request)
        if wanted is None or request.request_id in self._kept or not self._held:
            return None
        fits = self._held + self._need(request, wanted) <= self._most
        return None if fits else "no room for rows"

    def begin(self, plan: StepPlan, request: Request) -> None:
        wanted = self._wanted(request)
        if wanted is None or request.request_id in self._kept:
            return
        kept = Kept(wanted, request.num_prompt_tokens, self._facts)
        need = self._need(request, wanted)
        self._kept[request.request_id] = kept, need
        self._held += need
        for seq in request.sequences:
            seq.arrays[self.name] = partial(_array, kept)

    def release(self, request_id: str) -> None:
        # A request that waits again keeps its rows: tokens whose keys and values are cached are not
        # computed again.
        if request_id in self._kept and request_id not in self.engine.scheduler.roster.requests:
            self._held -= self._kept.pop(request_id)[1]

    def update(self, result: Raw) -> None:
        rows = msgpack.decode(result, type=Rows)
        values = rows.values.to_numpy()
        done = 0
        for seq_id, first, count in rows.places:
            seq = self.engine.scheduler.roster.sequences.get(seq_id)
            if seq is not None and seq.request.request_id in self._kept:
                kept, _ = self._kept[seq.request.request_id]
                kept.write(seq, first, values[done : done + count])
            done += count


def _array(kept: Kept, seq: Sequence) -> Array:
    return kept.array(seq)


class HiddenStatesPlanner(_RecordsPlanner):
    """Keeps hidden states."""

    name = HIDDEN_STATES


class RoutedExpertsPlanner(_RecordsPlanner):
    """Keeps the experts of tokens."""

    name = ROUTED_EXPERTS
