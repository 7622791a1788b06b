"""BeamStep: one token of a request's beam search."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from toolkit_lm.messages import Candidates, EngineOutput
from toolkit_lm.scheduler.beam import BeamSearch
from toolkit_lm.scheduler.request import Request, Sequence


class Fork(NamedTuple):
    """A beam of the next step, and the beam that it forks from."""

    parent: Sequence
    child: Sequence


class BeamStep:
    """Collects the candidates of a request's beams. When the last ones are in, it computes the next
    beams, or the outputs.

    Candidates are kept with their beams, since the beams of a request may be computed in several
    engine steps.
    """

    def __init__(self, request: Request, search: BeamSearch) -> None:
        self.request = request
        self.search = search

    def add(self, beam: Sequence, candidates: Candidates) -> bool:
        """Stores a beam's candidates. Returns True once all beams have theirs."""
        beam.candidates = candidates
        return all(sequence.candidates is not None for sequence in self.request.sequences)

    def advance(self, seq_ids: Iterator[int]) -> list[Fork]:
        """Returns the next beams, with ids from `seq_ids`; none when the search is over."""
        beams = self.request.sequences
        known = [beam.candidates for beam in beams if beam.candidates is not None]
        extensions = self.search.advance([beam.beam for beam in beams], known)
        return [
            Fork(beams[e.parent], beams[e.parent].extended(next(seq_ids), e.token_id, e.logprob))
            for e in extensions
        ]

    def outputs(self) -> list[EngineOutput]:
        """Returns the search's results, best first: n sequences, or fewer if the sampling
        parameters allow no more."""
        request = self.request
        return [
            EngineOutput(
                request_id=request.request_id,
                index=index,
                token_ids=hypothesis.token_ids,
                finish_reason=hypothesis.finish_reason,
                stop_token_id=hypothesis.token_ids[-1]
                if hypothesis.token_ids[-1] in request.stop_token_ids
                else None,
                num_cached_tokens=request.num_cached_tokens,
                cumulative_logprob=hypothesis.logprob,
                score=hypothesis.score,
            )
            for index, hypothesis in enumerate(self.search.hypotheses[: request.params.n])
        ]
