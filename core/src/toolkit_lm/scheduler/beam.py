"""Beam search: which continuations of a prompt are kept, and when the search is over."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from toolkit_lm.messages import Candidates


class Beam(NamedTuple):
    """A continuation that is still open."""

    token_ids: Sequence[int]
    """Of the output."""
    logprob: float
    """The sum of its tokens' log probabilities."""


class Extension(NamedTuple):
    """A beam of the next step: one of this step's, and a token more."""

    parent: int
    """Which of this step's beams."""
    token_id: int
    logprob: float
    """The sum over all tokens, this one included."""


class Hypothesis(NamedTuple):
    """A continuation that has come to its end."""

    token_ids: list[int]
    """Of the output, with the token that ended it."""
    score: float
    """logprob / number of tokens ** length_penalty: what hypotheses are ranked by."""
    logprob: float
    finish_reason: Literal["stop", "length"]


class BeamSearch:
    """One request's search. It decides as transformers' `generate(num_beams=width)` does; of
    equals, the earlier beam comes first."""

    def __init__(
        self,
        width: int,
        max_tokens: int,
        *,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        end_token_ids: Collection[int] = (),
    ) -> None:
        """`max_tokens`: most tokens of an output. `end_token_ids`: those that end one."""
        self.width = width
        self.max_tokens = max_tokens
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.end_token_ids = frozenset(end_token_ids)
        self.hypotheses: list[Hypothesis] = []
        """The best so far, at most `width`, the best first."""

    @property
    def num_candidates(self) -> int:
        """How many of a beam's likeliest tokens `advance` needs: though all end tokens be among
        them, `width` beams can go on."""
        return max(2, 1 + len(self.end_token_ids)) * self.width

    def advance(self, beams: Sequence[Beam], candidates: Sequence[Candidates]) -> list[Extension]:
        """The beams to go on with, the likeliest first; none when the search is over.

        `beams`: one before the first token, then those that the last call gave, in any order.
        `candidates`: of each beam.
        """
        found = (
            Extension(parent, token_id, beam.logprob + logprob)
            for parent, (beam, its) in enumerate(zip(beams, candidates, strict=True))
            for token_id, logprob in zip(its.token_ids, its.logprobs, strict=True)
        )
        best = heapq.nlargest(self.num_candidates, found, key=lambda extension: extension.logprob)
        length = len(beams[0].token_ids) + 1
        ended = [
            length >= self.max_tokens or extension.token_id in self.end_token_ids
            for extension in best
        ]
        # Whoever ends below the first `width` is dropped: had it gone on, it would not have been
        # kept.
        for extension, has_ended in zip(best[: self.width], ended, strict=False):
            if has_ended:
                self._keep(
                    [*beams[extension.parent].token_ids, extension.token_id], extension.logprob
                )
        live = [
            extension for extension, has_ended in zip(best, ended, strict=True) if not has_ended
        ][: self.width]
        return [] if self._is_over(live, length) else live

    def _keep(self, token_ids: list[int], logprob: float) -> None:
        reason: Literal["stop", "length"] = (
            "stop" if token_ids[-1] in self.end_token_ids else "length"
        )
        self.hypotheses.append(
            Hypothesis(token_ids, logprob / len(token_ids) ** self.length_penalty, logprob, reason)
        )
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.width :]

    def _is_over(self, live: Sequence[Extension], length: int) -> bool:
        if not live:
            return True
        if len(self.hypotheses) < self.width:
            return False
        if self.early_stopping is True:
            return True
        # A guess at the best that can still come: that of the likeliest beam, as if it ended now,
        # or as late as may be.
        late = self.early_stopping == "never" and self.length_penalty > 0
        hoped: float = (
            live[0].logprob / (self.max_tokens if late else length) ** self.length_penalty
        )
        return hoped <= self.hypotheses[-1].score
