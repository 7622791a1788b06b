"""DraftChain: the choice among the drafts of several drafters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from toolkit_lm.messages import StepPlan, StepResult
from toolkit_lm.step import Drafter, StepInputs

_PRIOR = 8.0
"""Drafts that a drafter's record begins with, all of them as good as it expected."""
_DECAY = 0.98
"""Factor of a drafter's record for each of its drafts that is verified after."""
_USUAL = 0.5
"""Probability of acceptance of a draft of a drafter that states none, before it has a record."""

Proposals = Mapping[str, Mapping[int, list[int]]]
"""Drafts by drafter and seq_id."""
Ask = Callable[[str, Callable[[Drafter], Any]], Any]
"""Calls a drafter, by name. Returns None if it fails or has failed."""


class _Piece(NamedTuple):
    """Drafts of one drafter, in one row's drafts."""

    drafter: str
    tokens: list[int]
    stated: Sequence[float]
    """Probability of each, as the drafter states it."""


@dataclass(slots=True)
class _Record:
    """Verified drafts of a drafter at one position of a row's drafts, older ones with less weight:
    how many were accepted, and how many by its own statement."""

    accepted: float = _PRIOR
    expected: float = _PRIOR

    def add(self, accepted: float, expected: float) -> None:
        self.accepted = _DECAY * self.accepted + accepted
        self.expected = _DECAY * self.expected + expected


class DraftChain:
    """Gives each row the drafts of the drafter whose expected number of accepted drafts is largest.
    The other drafters, in their order, may extend them."""

    def __init__(self, vocab_size: float) -> None:
        self._vocab_size = vocab_size
        self._records: dict[tuple[str, int], _Record] = defaultdict(_Record)
        self._pending: dict[int, list[_Piece]] = {}
        """Drafts that a later step verifies, by seq_id."""

    def remove(self, seq_id: int) -> None:
        """Forgets a sequence."""
        self._pending.pop(seq_id, None)

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Adds a step's verified drafts to the records, and to the result by drafter."""
        if not self._pending:
            return
        for row, drawn in zip(plan.scheduled, result.token_ids, strict=True):
            if not drawn or (pieces := self._pending.pop(row.seq_id, None)) is None:
                continue
            drafts = row.tokens[len(row.tokens) - row.num_drafts :]
            place = 0
            for piece in pieces:
                # Drafts may have been cut, or replaced by tokens that a grammar forces.
                proposed = drafts[place : place + len(piece.tokens)]
                count = len(proposed)
                if not count or proposed != piece.tokens[:count]:
                    break
                # The last token that was drawn is no draft.
                left = len(drawn) - 1 - place
                right = min(max(left, 0), count)
                result.drafters.setdefault(row.seq_id, []).append((piece.drafter, count, right))
                for at, stated in enumerate(piece.stated[: right + 1] if left >= 0 else ()):
                    self._records[piece.drafter, place + at].add(at < right, stated)
                place += count

    def keep(self, name: str, drafts: Mapping[int, list[int]]) -> None:
        """Keeps all drafts of an only drafter."""
        self._pending |= {seq_id: [_Piece(name, some, ())] for seq_id, some in drafts.items()}

    def choose(self, inputs: StepInputs, proposals: Proposals, ask: Ask) -> dict[int, list[int]]:
        """Returns each sequence's drafts."""
        chosen: dict[int, list[int]] = {}
        for place in inputs.sampling:
            seq_id = inputs.plan.scheduled[place].seq_id
            offers = [
                self._piece(name, seq_id, drafts[seq_id], ask)
                for name, drafts in proposals.items()
                if drafts.get(seq_id)
            ]
            if not offers:
                continue
            best = max(offers, key=self._gain)
            others = [name for name in proposals if name != best.drafter]
            tokens = inputs.histories.tokens(inputs.rows[place])
            pieces = [best, *self._extensions(seq_id, tokens, best, others, ask)]
            self._pending[seq_id] = pieces
            chosen[seq_id] = [token for piece in pieces for token in piece.tokens]
        return chosen

    def _gain(self, offer: _Piece) -> float:
        """Expected number of accepted drafts. The records correct the drafter's statements."""
        total = 0.0
        chance = 1.0
        for place, stated in enumerate(offer.stated):
            record = self._records[offer.drafter, place]
            chance *= min(stated * record.accepted / max(record.expected, 1e-6), 1)
            total += chance
        return total

    def _extensions(
        self, seq_id: int, tokens: np.ndarray, best: _Piece, others: Iterable[str], ask: Ask
    ) -> list[_Piece]:
        drafts = list(best.tokens)
        pieces: list[_Piece] = []
        for name in others:
            known = np.concatenate((tokens, np.array(drafts, np.int32)))
            known.flags.writeable = False
            if more := ask(name, partial(self._extension, seq_id, known, len(drafts))):
                pieces.append(self._piece(name, seq_id, more, ask))
                drafts += more
        return pieces

    def _extension(
        self, seq_id: int, known: np.ndarray, num_drafts: int, drafter: Drafter
    ) -> list[int]:
        more = drafter.extend(seq_id, known, num_drafts)
        check_tokens(drafter, more, self._vocab_size)
        return more

    @staticmethod
    def _piece(name: str, seq_id: int, drafts: list[int], ask: Ask) -> _Piece:
        stated = ask(name, lambda drafter: _stated(drafter, seq_id, drafts))
        return _Piece(name, drafts, [_USUAL] * len(drafts) if stated is None else stated)


def check_tokens(drafter: Drafter, tokens: object, vocab_size: float) -> None:
    """Raises ValueError unless `tokens` is a list of the model's tokens."""
    if not isinstance(tokens, list) or not (
        {int}.issuperset(map(type, tokens))
        and min(tokens, default=0) >= 0
        and max(tokens, default=0) < vocab_size
    ):
        raise ValueError(
            f"{type(drafter).__qualname__} has proposed {tokens!r}: no list of token ids"
        )


def _stated(drafter: Drafter, seq_id: int, drafts: list[int]) -> list[float] | None:
    """Probabilities that a drafter states. Raises ValueError for other than one each."""
    stated = drafter.acceptance(seq_id, drafts)
    if stated is None:
        return None
    values = [float(value) for value in stated]
    if len(values) != len(drafts) or not all(0 <= value <= 1 for value in values):
        raise ValueError(
            f"{type(drafter).__qualname__}.acceptance() has returned {stated!r}: no probability "
            f"for each of {len(drafts)} drafts"
        )
    return values
