"""ModelDrafter: base of drafters that have layers of their own."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from toolkit_lm.attention import CacheLayer
from toolkit_lm.config import VllmConfig
from toolkit_lm.messages import NewSequence, StepResult
from toolkit_lm.model import Model, construct, load_model
from toolkit_lm.plugin import Plugins
from toolkit_lm.step import StepInputs, StepRun
from toolkit_lm_weights.beside import add_beside
from torch import Tensor, nn

from toolkit_lm_drafters.filled import FilledPrefixes
from toolkit_lm_drafters.following import Following
from toolkit_lm_drafters.step_table import Tabled

_NEVER = -1e4
"""Logit of a token that is not drafted."""


_MOST_KEPT = 32
"""Tokens of a sequence that are left to a later step."""


class Network(NamedTuple):
    """Maker of a drafter's network."""

    kind: type[Model]
    config: VllmConfig
    prefix: str
    """Of its layers' names. It begins with "drafter/"."""

    def load(self, device: torch.device, plugins: Plugins) -> Model:
        """Makes it and loads its weights. Raises CheckpointError."""
        return load_model(self.kind, self.config, device, plugins, prefix=self.prefix)


class Entries(NamedTuple):
    """Entries of the drafter's KV cache that a pass computes: consecutive ones of N rows."""

    rows: np.ndarray
    """[N] indices into the step's rows."""
    start: np.ndarray
    """[N] index of each row's first entry."""
    tokens: Sequence[np.ndarray]
    """Token ids that each row's entries read."""


class _Batch(NamedTuple):
    """Entries of a first pass, and the hidden states that they read."""

    rows: np.ndarray
    start: np.ndarray
    counts: np.ndarray
    hidden: Tensor | None

    def entries(self, lines: Sequence[np.ndarray], offset: int) -> Entries:
        """`lines`: tokens of each row. Entry i reads token i + offset."""
        tokens = [
            _window(line, place, count)
            for line, place, count in zip(lines, self.start + offset, self.counts, strict=True)
        ]
        return Entries(self.rows, self.start, tokens)


class ModelDrafter(Tabled):
    """Computes a step's tokens with layers of its own, and continues alone from the sampled tokens.

    The layers have KV groups in the engine: prefixes are cached, preempted, swapped and forked with
    the model's. The next step overwrites the entries of rejected drafts.

    A drafter that reads token ids alone, and keeps all keys and values, computes nothing while it
    rests: what it has missed of a sequence, its prompt too, is computed once drafts of it are
    wanted. One that reads hidden states follows each step, unless that takes too much of it. Then
    it drafts for later sequences alone.
    """

    offset: ClassVar[int] = 0
    """0: entry i reads token i. 1: entry i reads token i + 1, and the hidden state of token i."""
    num_heads: int = 1
    """Number of passes over a step's tokens. Pass k reads tokens that are k further on, and the
    hidden states of pass k - 1. Later drafts repeat the last head, for one token each."""
    network: nn.Module
    """Module with the layers. A subclass sets it. Layer names begin with "drafter/"."""

    def __init__(self, *arguments: Any, **own: Any) -> None:
        super().__init__(*arguments, **own)
        self.num_drafts: int = self.options.num_drafts
        self.lookahead = self.num_drafts
        # Token ids are known at any time.
        self.follows_decodes = self.offset > 0
        self._following = Following()
        self._filled: dict[int, int] = {}
        """Number of entries that are there, by seq_id. Unknown: those of all computed tokens, or
        if it reads prompts late those of the prefixes below."""
        self._prefixes = FilledPrefixes()
        self._kept: dict[int, list[Tensor]] = {}
        """Hidden states for the next entries, by seq_id."""

    @classmethod
    @abstractmethod
    def network_of(
        cls, model: nn.Module, config: VllmConfig, plugins: Plugins, options: Any
    ) -> Network:
        """Returns what makes the network. Reads no weight. Raises ConfigError."""

    @classmethod
    def describe(
        cls, model: nn.Module, config: VllmConfig, *, plugins: Plugins, options: Any
    ) -> list[str]:
        kind, own, prefix = cls.network_of(model, config, plugins, options)
        network = construct(kind, own, torch.device("meta"), plugins, prefix=prefix)
        weights = list(network.parameters())
        num_layers = sum(isinstance(module, CacheLayer) for module in network.modules())
        size = sum(weight.nbytes for weight in weights) / 2**20
        return [
            f"{sum(weight.numel() for weight in weights):,} parameters of its own, {size:,.1f} "
            f"MiB; {num_layers} {'layer' if num_layers == 1 else 'layers'} with a KV cache",
            *super().describe(model, config, plugins=plugins, options=options),
        ]

    @abstractmethod
    def run(self, step: StepRun, entries: Entries, hidden: Tensor | None, head: int) -> Tensor:
        """Runs a head over the entries. Returns a hidden state for each entry.

        `hidden`: the hidden states that the entries read, from `first_hidden` or a pass before;
        None if `offset` is 0."""

    @abstractmethod
    def logits(self, hidden: Tensor, head: int) -> Tensor:
        """Returns logits [N, V] of the next tokens, from N hidden states of `run`."""

    def states_of(self, hidden_states: Tensor, step: StepRun) -> Tensor:
        """Returns a copy of the model's hidden states that the drafter reads, [T, ...]. Only called
        if `offset` is 1."""
        return hidden_states.clone()

    def first_hidden(self, states: Tensor) -> Tensor:
        """Returns what entries of the first pass read, from hidden states of `states_of`."""
        return states

    @cached_property
    def _reads_late(self) -> bool:
        """Whether prompts are read only once drafts are wanted: all that is needed is there then,
        token ids and slots."""
        kept = [layer.keeps for layer in self.layers().values()]
        return not self.offset and all(
            spec is not None
            and (spec.caches_prefixes and spec.grows and not spec.first_needed(2**30))
            for spec in kept
        )

    def load(self, weights: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        add_beside(self.model, self)

    def made_again(self) -> nn.Module:
        """Makes the network anew, from its checkpoint."""
        made_of = self.network_of(self.model, self.config, self.plugins, self.options)
        return made_of.load(self.device, self.plugins)

    def layers(self) -> Mapping[str, CacheLayer]:
        found = (module for module in self.network.modules() if isinstance(module, CacheLayer))
        return {layer.prefix: layer for layer in found}

    def propose(self, token_ids: np.ndarray) -> list[int]:
        """Drafts nothing, since `finish` drafts for all sequences together."""
        return []

    def add(self, seq: NewSequence) -> None:
        if self.offset and not self.follows_decodes:
            self._following.added()
            self.follows_decodes = self._following.is_on

    def remove(self, seq_id: int) -> None:
        self._filled.pop(seq_id, None)
        self._kept.pop(seq_id, None)
        self._prefixes.remove(seq_id)

    def follow(self, inputs: StepInputs, hidden_states: Tensor, step: StepRun) -> None:
        """Leaves a step to a later one, if prompts are read late. Otherwise computes the entries
        of prompts, so that cached prefixes have them. Single tokens are left to a later step: their
        hidden states are kept, and their ids are known."""
        if self._reads_late:
            self._leave(inputs, np.arange(len(inputs.rows)))
            return
        begun = time.perf_counter()
        self._follow(inputs, hidden_states, step)
        # Several ranks would have to agree.
        if self.offset and self.config.parallel.tensor_parallel_size == 1:
            is_decode = len(inputs.input_ids) == len(inputs.rows)
            if is_decode and self._following.followed(begun):
                self.follows_decodes = False
                self._kept.clear()

    def _follow(self, inputs: StepInputs, hidden_states: Tensor, step: StepRun) -> None:
        if len(inputs.input_ids) == len(inputs.rows) and self._keeps(inputs, hidden_states, step):
            return
        known = inputs.histories.num_tokens[inputs.rows].astype(np.int64)
        ends = np.minimum(inputs.starts + inputs.num_tokens, known - self.offset)
        hidden = self.states_of(hidden_states, step) if self.offset else None
        rows = np.flatnonzero(ends > inputs.starts)
        rows = rows[self._not_left(inputs, rows, ends, hidden)]
        if len(rows):
            lines = _lines(inputs, rows, known[rows])
            batch = self._batch(inputs, rows, ends[rows], lines, hidden, step)
            passed = batch.hidden
            for head in range(self.num_heads):
                passed = self.run(step, batch.entries(lines, self.offset + head), passed, head)

    def _keeps(self, inputs: StepInputs, hidden_states: Tensor, step: StepRun) -> bool:
        """Leaves a step of single tokens to a later one. False: some row has to be computed."""
        scheduled = inputs.plan.scheduled
        if self.offset:
            kept = [self._kept.setdefault(row.seq_id, []) for row in scheduled]
            known = inputs.histories.num_tokens[inputs.rows]
            if max(map(len, kept)) >= _MOST_KEPT or (known <= inputs.starts + self.offset).any():
                return False
            hidden = self.states_of(hidden_states, step)
            for pieces, own in zip(kept, torch.split(hidden, 1), strict=True):
                pieces.append(own)
        for row in scheduled:
            self._filled.setdefault(row.seq_id, row.start)
        return True

    def _leave(self, inputs: StepInputs, rows: np.ndarray) -> None:
        """Notes that prompts' tokens have no entries."""
        for row in rows:
            scheduled = inputs.plan.scheduled[row]
            if scheduled.num_tokens - scheduled.num_drafts > 1:
                end = scheduled.start + scheduled.num_tokens
                tokens = inputs.histories.token_ids[inputs.rows[row], :end]
                self._prefixes.leave(tokens, scheduled.start)

    def _not_left(
        self, inputs: StepInputs, rows: np.ndarray, ends: np.ndarray, hidden: Tensor | None
    ) -> np.ndarray:
        """[N] whether a row's entries are computed now. Others are left to a later step, with their
        hidden states."""
        is_now = np.ones(len(rows), bool)
        single = ends[rows] - inputs.starts[rows] <= 1
        for index in np.flatnonzero(single):
            row = rows[index]
            seq_id = inputs.plan.scheduled[row].seq_id
            self._filled.setdefault(seq_id, int(inputs.starts[row]))
            if hidden is None:
                is_now[index] = False
                continue
            kept = self._kept.setdefault(seq_id, [])
            if len(kept) < _MOST_KEPT:
                is_now[index] = False
                place = inputs.query_start[row]
                kept.append(hidden[place : place + 1])
        return is_now

    def finish(
        self, inputs: StepInputs, hidden_states: Tensor, result: StepResult, step: StepRun
    ) -> None:
        """First pass: the step's tokens, and those that were left to it. Later passes: one draft of
        each row."""
        self._following.asked()
        known = inputs.histories.num_tokens[inputs.rows].astype(np.int64)
        draws = np.array([bool(drawn) for drawn in result.token_ids])
        most = np.zeros(len(draws), np.int64)
        most[inputs.sampling] = self._evened(inputs.max_drafts)
        # A sampled token has no hidden state yet: only offset 0 reads it.
        reached = inputs.starts + inputs.num_tokens + (draws if self.offset == 0 else 0)
        ends = np.minimum(reached, known - self.offset)
        hidden = self.states_of(hidden_states, step) if self.offset else None
        rows = np.flatnonzero(ends > inputs.starts)
        if self.offset and not self.follows_decodes:
            rows = rows[[not self._has_gap(inputs, int(row)) for row in rows]]
        if self._reads_late:
            rows = self._wanted(inputs, rows)
        else:
            is_now = ~draws[rows] | (most[rows] > 0)
            after = np.minimum(ends, inputs.starts + inputs.num_tokens)
            is_now[~is_now] = self._not_left(inputs, rows[~is_now], after, hidden)
            rows = rows[is_now]
        if not len(rows):
            return
        known = known[rows]
        most = most[rows]
        lines = _lines(inputs, rows, known)
        batch = self._batch(inputs, rows, ends[rows], lines, hidden, step)
        hidden = batch.hidden
        lasts = batch.counts.cumsum() - 1
        live = np.flatnonzero(draws[rows] & (most > 0))
        drafts = np.zeros((len(live), 0), np.int64)
        last = None
        for ahead in range(self.num_drafts):
            # A draft is of use where it is wanted, and the token after it can be drawn too.
            going = (ahead < most[live]) & (known[live] + ahead + 1 < self.config.max_model_len)
            if not going.all():
                self._give(inputs, result, rows[live[~going]], drafts[~going])
                live, drafts = live[going], drafts[going]
                last = None if last is None else last[_indices(going, last)]
            if not len(live) and ahead >= self.num_heads:
                return
            head = min(ahead, self.num_heads - 1)
            if ahead < self.num_heads:
                hidden = self.run(step, batch.entries(lines, self.offset + ahead), hidden, head)
                last = hidden[_indices(lasts[live], hidden)]
            else:
                entry = known[live] - self.offset + ahead - self.num_heads
                last = self.run(step, Entries(rows[live], entry, list(drafts[:, -1:])), last, head)
            if not torch.isfinite(last).all():
                raise ValueError("a hidden state of the draft is not finite")
            if len(live):
                drawn = step.draw(self.logits(last, head), rows[live], ahead, drafts)
                drafts = np.concatenate((drafts, drawn[:, None]), axis=1)
                if ahead + 1 < self.num_heads:
                    for index, token in zip(live, drawn, strict=True):
                        lines[index] = np.append(lines[index], token)
        self._give(inputs, result, rows[live], drafts)

    def _evened(self, wanted: np.ndarray) -> np.ndarray:
        """Most drafts of each row [S], from those that are wanted. The budget's times are of rows
        with equally many, and a pass for one row takes about as long as one for all: no row gets
        more than the mean, rounded up."""
        some: np.ndarray = np.minimum(wanted, self.num_drafts)
        if self.config.scheduler.draft_budget != "all" and some.any():
            some = np.minimum(some, math.ceil(some[some > 0].mean()))
        return some

    def _wanted(self, inputs: StepInputs, rows: np.ndarray) -> np.ndarray:
        """The rows that are computed now: those of which drafts are wanted, as far as a step's
        budget reaches for what they have missed. Others are left to later steps."""
        limits = inputs.plan.max_drafts
        scheduled = inputs.plan.scheduled
        is_now = np.array([limits.get(scheduled[row].seq_id, 1) > 0 for row in rows], bool)
        wanted = rows[is_now]
        for row in wanted:
            seq_id = scheduled[row].seq_id
            if seq_id not in self._filled:
                tokens = inputs.histories.token_ids[inputs.rows[row], : inputs.starts[row]]
                self._filled[seq_id] = self._prefixes.count(tokens)
        gaps = inputs.starts[wanted] - [self._filled[scheduled[row].seq_id] for row in wanted]
        order = np.argsort(gaps, kind="stable")
        fits = gaps[order].cumsum() <= self.config.scheduler.token_budget
        fits[:1] = True
        wanted = np.sort(wanted[order[fits]])
        self._leave(inputs, np.setdiff1d(rows, wanted, assume_unique=True))
        return wanted

    def _has_gap(self, inputs: StepInputs, row: int) -> bool:
        """Whether entries of a row are missing, and the hidden states for them are gone."""
        seq_id = inputs.plan.scheduled[row].seq_id
        start = int(inputs.starts[row])
        missing = start - self._filled.get(seq_id, start)
        return missing > sum(map(len, self._kept.get(seq_id, ())))

    def _batch(
        self,
        inputs: StepInputs,
        rows: np.ndarray,
        ends: np.ndarray,
        lines: Sequence[np.ndarray],
        hidden: Tensor | None,
        step: StepRun,
    ) -> _Batch:
        """The entries up to `ends` of some rows that are not filled yet. They count as filled from
        now on."""
        seq_ids = [inputs.plan.scheduled[row].seq_id for row in rows]
        starts = inputs.starts[rows]
        filled = np.array(
            [self._filled.get(id_, start) for id_, start in zip(seq_ids, starts, strict=True)]
        )
        self._filled.update(zip(seq_ids, ends.tolist(), strict=True))
        # A sampled token may have an entry before the step that computes it.
        start = np.minimum(filled, ends - 1 if self._reads_late else starts)
        if hidden is None:
            start = self._catch_up(rows, start, np.maximum(start, starts), lines, step)
            if self._reads_late:
                for seq_id, line, end in zip(seq_ids, lines, ends.tolist(), strict=True):
                    self._prefixes.add(seq_id, line, end)
            return _Batch(rows, start, ends - start, None)
        kept = [self._kept.pop(seq_id, []) for seq_id in seq_ids]
        counts = ends - starts
        places = _places(inputs.query_start[rows], counts)
        if (start == starts).all():
            own = self.first_hidden(hidden[_indices(places, hidden)])
            return _Batch(rows, starts, counts, own)
        # Hidden states that are not all there are of no use: their entries stay empty.
        complete = np.array([sum(map(len, pieces)) for pieces in kept]) == starts - start
        start = np.where(complete, start, starts)
        pieces: list[Tensor] = []
        current = torch.split(hidden[_indices(places, hidden)], counts.tolist())
        for is_complete, before, now in zip(complete, kept, current, strict=True):
            pieces += [*before, now] if is_complete else [now]
        return _Batch(rows, start, ends - start, self.first_hidden(torch.cat(pieces)))

    def _catch_up(
        self,
        rows: np.ndarray,
        start: np.ndarray,
        starts: np.ndarray,
        lines: Sequence[np.ndarray],
        step: StepRun,
    ) -> np.ndarray:
        """Fills entries of earlier steps, at most a step's budget of tokens at a time, until few
        are left. Returns each row's first entry after that."""
        budget = self.config.scheduler.token_budget
        while (gaps := starts - start).sum() > _MOST_KEPT * len(rows):
            counts = np.minimum(gaps, np.maximum(budget - (gaps.cumsum() - gaps), 0))
            some = np.flatnonzero(counts)
            tokens = [lines[int(i)][start[i] : start[i] + counts[i]] for i in some]
            self.run(step, Entries(rows[some], start[some], tokens), None, 0)
            start = start + counts
        return start

    def _give(
        self, inputs: StepInputs, result: StepResult, rows: np.ndarray, drafts: np.ndarray
    ) -> None:
        for row, some in zip(rows, drafts, strict=True):
            result.drafts[inputs.plan.scheduled[row].seq_id] = some.tolist()


def expanded(logits: Tensor, vocab_size: int, tokens: Tensor | None = None) -> Tensor:
    """Logits of some tokens -> [N, vocab_size]. `tokens`: which they are; None: the first. Others
    get a logit that is never drawn while any of these may be."""
    if logits.shape[1] == vocab_size and tokens is None:
        return logits
    # Not -inf: a request may allow none of these tokens.
    out = logits.new_full((len(logits), vocab_size), _NEVER)
    if tokens is None:
        out[:, : logits.shape[1]] = logits
    else:
        out[:, tokens] = logits
    return out


def _window(line: np.ndarray, place: int, count: int) -> np.ndarray:
    """Returns `count` tokens from `place` on. Beyond the end, the last one is repeated."""
    found = line[place : place + count]
    if len(found) == count:
        return found
    return np.concatenate((found, np.repeat(line[-1:], count - len(found))))


def _lines(inputs: StepInputs, rows: np.ndarray, known: np.ndarray) -> list[np.ndarray]:
    """All tokens of some rows."""
    histories = inputs.histories.token_ids
    places = inputs.rows[rows]
    return [histories[place, :end] for place, end in zip(places, known, strict=True)]


def _places(start: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Indices of `counts` consecutive places from each `start` on."""
    before = counts.cumsum() - counts
    places: np.ndarray = np.arange(counts.sum()) + np.repeat(start - before, counts)
    return places


def _indices(places: np.ndarray, of: Tensor) -> Tensor:
    return torch.from_numpy(places).to(of.device)
