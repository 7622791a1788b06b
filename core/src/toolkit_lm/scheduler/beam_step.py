"""BeamStep: one token of a request's beam search."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from toolkit_lm.messages import Candidates, EngineOutput
from toolkit_lm.scheduler.beam import BeamSearch
from toolkit_lm.scheduler.request import Request, Sequence


class Fork(NamedTuple):
    """A beam of the next step, and the one that it goes on from."""

    parent: Sequence
    child: Sequence


class BeamStep:
    """Takes the candidates of a request's beams. With the last of them it gives the next beams, or
    the outputs.

    The candidates are kept with the beams, which may be computed in several steps of the engine.
    """

    def __init__(self, request: Request, search: BeamSearch) -> None:
        self.request = request
        self.search = search

    def take(self, beam: Sequence, candidates: Candidates) -> bool:
        """True: all beams have their candidates."""
        beam.candidates = candidates
        return all(one.candidates is not None for one in self.request.sequences)

    def advance(self, seq_ids: Iterator[int]) -> list[Fork]:
        """The next beams, which take their ids from `seq_ids`; none when the search is over."""
        beams = self.request.sequences
        known = [one.candidates for one in beams if one.candidates is not None]
        extensions = self.search.advance([one.beam for one in beams], known)
        return [
            Fork(beams[e.parent], beams[e.parent].extended(next(seq_ids), e.token_id, e.logprob))
            for e in extensions
        ]

    def outputs(self) -> list[EngineOutput]:
        """What the search has found, the best first: n sequences, or fewer where the sampling
        parameters leave no more."""
        request = self.request
        return [
            EngineOutput(
                request_id=request.request_id,
                index=index,
                token_ids=one.token_ids,
                finish_reason=one.finish_reason,
                stop_token_id=one.token_ids[-1]
                if one.token_ids[-1] in request.stop_token_ids
                else None,
                num_cached_tokens=request.num_cached_tokens,
                cumulative_logprob=one.logprob,
                score=one.score,
            )
            for index, one in enumerate(self.search.hypotheses[: request.params.n])
        ]
