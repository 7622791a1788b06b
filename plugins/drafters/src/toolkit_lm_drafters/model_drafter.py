"""ModelDrafter: base of drafters that have layers of their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from toolkit_lm.attention import CacheLayer
from toolkit_lm.messages import StepResult
from toolkit_lm.step import Drafter, StepInputs, StepRun
from torch import Tensor, nn

_NEVER = -1e4
"""Logit of a token that is not drafted."""


class Entries(NamedTuple):
    """Entries of the drafter's KV cache that a pass computes: consecutive ones of N rows."""

    rows: np.ndarray
    """[N] indices into the step's rows."""
    start: np.ndarray
    """[N] index of each row's first entry."""
    tokens: Sequence[np.ndarray]
    """Token ids that each row's entries read."""


class ModelDrafter(Drafter):
    """Computes a step's tokens with layers of its own, and continues alone from the sampled tokens.

    The layers have KV groups in the engine: prefixes are cached, preempted, swapped and forked with
    the model's. The next step overwrites the entries of rejected drafts.
    """

    rests = False
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
        self._missed: dict[int, int] = {}
        """First entry of each sequence that no step has computed, by seq_id."""

    @abstractmethod
    def run(self, step: StepRun, entries: Entries, hidden: Tensor | None, head: int) -> Tensor:
        """Runs a head over the entries. Returns a hidden state for each entry.

        `hidden`: the hidden states that the entries read, from `first_hidden` or a pass before;
        None if `offset` is 0."""

    @abstractmethod
    def logits(self, hidden: Tensor, head: int) -> Tensor:
        """Returns logits [N, V] of the next tokens, from N hidden states of `run`."""

    def first_hidden(self, hidden_states: Tensor, step: StepRun) -> Tensor | None:
        """Returns what the entries of the first pass read, for all tokens of the step [T, ...]."""
        return hidden_states if self.offset else None

    def layers(self) -> Mapping[str, CacheLayer]:
        found = (module for module in self.network.modules() if isinstance(module, CacheLayer))
        return {layer.prefix: layer for layer in found}

    def remove(self, seq_id: int) -> None:
        self._missed.pop(seq_id, None)

    def skip(self, inputs: StepInputs) -> None:
        for row, start in zip(inputs.plan.scheduled, inputs.starts.tolist(), strict=True):
            self._missed.setdefault(row.seq_id, start)

    def propose(self, token_ids: np.ndarray) -> list[int]:
        """Drafts nothing, since `finish` drafts for all sequences together."""
        return []

    def finish(
        self, inputs: StepInputs, hidden_states: Tensor, result: StepResult, step: StepRun
    ) -> None:
        """First pass: the step's tokens. Later passes: one draft of each row."""
        known = inputs.histories.num_tokens[inputs.rows].astype(np.int64)
        draws = np.array([bool(drawn) for drawn in result.token_ids])
        # A sampled token has no hidden state yet: only offset 0 reads it.
        reached = inputs.starts + inputs.num_tokens + (draws if self.offset == 0 else 0)
        ends = np.minimum(reached, known - self.offset)
        rows = np.flatnonzero(ends > inputs.starts)
        if not len(rows):
            return
        start = inputs.starts[rows]
        for place, row in enumerate(rows.tolist() if self._missed else ()):
            seq_id = inputs.plan.scheduled[row].seq_id
            start[place] = self._missed.pop(seq_id, int(start[place]))
        counts = ends[rows] - start
        known = known[rows]
        lines = [
            inputs.histories.token_ids[row, :end]
            for row, end in zip(inputs.rows[rows], known, strict=True)
        ]
        hidden = self.first_hidden(hidden_states, step)
        if hidden is not None:
            hidden = hidden[_indices(_places(inputs.query_start[rows], counts), hidden)]
        lasts = counts.cumsum() - 1
        live = np.flatnonzero(draws[rows])
        drafts = np.zeros((len(live), 0), np.int64)
        last = None
        for ahead in range(self.num_drafts):
            head = min(ahead, self.num_heads - 1)
            if ahead < self.num_heads:
                places = start + self.offset + ahead
                tokens = [
                    _window(line, place, count)
                    for line, place, count in zip(lines, places, counts, strict=True)
                ]
                hidden = self.run(step, Entries(rows, start, tokens), hidden, head)
                last = hidden[_indices(lasts[live], hidden)]
            else:
                entry = known[live] - self.offset + ahead - self.num_heads
                last = self.run(step, Entries(rows[live], entry, list(drafts[:, -1:])), last, head)
            if not torch.isfinite(last).all():
                raise ValueError("a hidden state of the draft is not finite")
            # A draft is of use where the token after it can be drawn too.
            going = known[live] + ahead + 1 < self.config.max_model_len
            if not going.all():
                self._give(inputs, result, rows[live[~going]], drafts[~going])
                live, drafts, last = live[going], drafts[going], last[_indices(going, last)]
            if len(live):
                drawn = step.draw(self.logits(last, head), rows[live], ahead, drafts)
                drafts = np.concatenate((drafts, drawn[:, None]), axis=1)
                if ahead + 1 < self.num_heads:
                    for index, token in zip(live, drawn, strict=True):
                        lines[index] = np.append(lines[index], token)
            elif ahead + 1 >= self.num_heads:
                return
        self._give(inputs, result, rows[live], drafts)

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


def _places(start: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Indices of `counts` consecutive places from each `start` on."""
    before = counts.cumsum() - counts
    places: np.ndarray = np.arange(counts.sum()) + np.repeat(start - before, counts)
    return places


def _indices(places: np.ndarray, of: Tensor) -> Tensor:
    return torch.from_numpy(places).to(of.device)
