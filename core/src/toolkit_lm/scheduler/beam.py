"""Beam search: the choice of the continuations to keep, and the end of the search."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from toolkit_lm.messages import Candidates


class Beam(NamedTuple):
    """An unfinished continuation."""

    token_ids: Sequence[int]
    """Output tokens of the beam."""
    logprob: float
    """Sum of the log probabilities of the beam's tokens."""


class Extension(NamedTuple):
    """A beam of the next step: a beam of this step, extended by one token."""

    parent: int
    """Index of the extended beam among this step's beams."""
    token_id: int
    logprob: float
    """Sum of the log probabilities of all tokens, the new one included."""


class Hypothesis(NamedTuple):
    """A finished continuation."""

    token_ids: list[int]
    """Output tokens, with the token that ended the sequence."""
    score: float
    """Score that hypotheses are ranked by: logprob / number of tokens ** length_penalty."""
    logprob: float
    finish_reason: Literal["stop", "length"]


class BeamSearch:
    """The beam search of one request. It decides as transformers' `generate(num_beams=width)` does.
    Among equal scores, the earlier beam comes first."""

    def __init__(
        self,
        width: int,
        max_tokens: int,
        *,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        end_token_ids: Collection[int] = (),
    ) -> None:
        """`max_tokens`: most tokens of an output. `end_token_ids`: tokens that end an output."""
        self.width = width
        self.max_tokens = max_tokens
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.end_token_ids = frozenset(end_token_ids)
        self.hypotheses: list[Hypothesis] = []
        """The best hypotheses so far, at most `width`, best first."""

    @property
    def num_candidates(self) -> int:
        """Number of candidates that `advance` needs per beam. It suffices to continue `width` beams
        even if all end tokens are among the candidates."""
        return max(2, 1 + len(self.end_token_ids)) * self.width

    def advance(self, beams: Sequence[Beam], candidates: Sequence[Candidates]) -> list[Extension]:
        """Returns the beams of the next step, likeliest first; none when the search is over.

        `beams`: one before the first token, then those that the last call returned, in any order.
        `candidates`: the candidates of each beam.
        """
        found = (
            Extension(parent, token_id, beam.logprob + logprob)
            for parent, (beam, extensions) in enumerate(zip(beams, candidates, strict=True))
            for token_id, logprob in zip(extensions.token_ids, extensions.logprobs, strict=True)
        )
        best = heapq.nlargest(self.num_candidates, found, key=lambda extension: extension.logprob)
        length = len(beams[0].token_ids) + 1
        ended = [
            length >= self.max_tokens or extension.token_id in self.end_token_ids
            for extension in best
        ]
        # A beam that ends below the first `width` is dropped: had it continued, it would not have
        # been kept.
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
        # Upper estimate of the scores still possible: the likeliest beam ends now, or as late as it
        # can.
        late = self.early_stopping == "never" and self.length_penalty > 0
        hoped: float = (
            live[0].logprob / (self.max_tokens if late else length) ** self.length_penalty
        )
        return hoped <= self.hypotheses[-1].score
