"""BeamSearch against transformers' beam search, over a model whose next-token scores are a random
function of the whole prefix."""

from __future__ import annotations

import random

import pytest
import torch
from toolkit_lm.messages import Candidates
from toolkit_lm.scheduler.beam import Beam, BeamSearch

PROMPT = [0, 1]


def logprobs(token_ids: tuple[int, ...], vocab_size: int) -> torch.Tensor:
    """[V] float32: log probabilities of what comes after these tokens."""
    generator = torch.Generator().manual_seed(hash(token_ids) % 2**63)
    return torch.log_softmax(2 * torch.randn(vocab_size, generator=generator), dim=-1)


def ours(search: BeamSearch, vocab_size: int) -> tuple[list[tuple[list[int], float]], int]:
    """(tokens and score of each hypothesis, number of steps)"""
    beams = [Beam([], 0.0)]
    steps = 0
    while beams:
        candidates = []
        for beam in beams:
            best = logprobs((*PROMPT, *beam.token_ids), vocab_size).topk(
                min(search.num_candidates, vocab_size)
            )
            candidates.append(Candidates(best.indices.tolist(), best.values.tolist()))
        extensions = search.advance(beams, candidates)
        assert len(extensions) in (0, search.width)
        beams = [Beam([*beams[e.parent].token_ids, e.token_id], e.logprob) for e in extensions]
        steps += 1
    return [(one.token_ids, one.score) for one in search.hypotheses], steps


def theirs(search: BeamSearch, vocab_size: int) -> tuple[list[tuple[list[int], float]], int]:
    from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutput

    class Table(PreTrainedModel, GenerationMixin):
        config_class = PretrainedConfig

        def __init__(self):
            super().__init__(PretrainedConfig(vocab_size=vocab_size))
            self.one = torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids, **_):
            scores = torch.stack([logprobs(tuple(row), vocab_size) for row in input_ids.tolist()])
            return CausalLMOutput(logits=scores[:, None].expand(-1, input_ids.shape[1], -1))

    config = GenerationConfig(
        num_beams=search.width,
        num_return_sequences=search.width,
        max_new_tokens=search.max_tokens,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        eos_token_id=sorted(search.end_token_ids) or None,
        pad_token_id=0,
        do_sample=False,
        use_cache=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = Table().eval().generate(torch.tensor([PROMPT]), generation_config=config)
    return [
        (until_the_end(row, search.end_token_ids), score)
        for row, score in zip(
            found.sequences[:, len(PROMPT) :].tolist(), found.sequences_scores.tolist(), strict=True
        )
    ], len(found.scores)


def until_the_end(tokens: list[int], end_token_ids: frozenset[int]) -> list[int]:
    return next(
        (tokens[: i + 1] for i, token in enumerate(tokens) if token in end_token_ids), tokens
    )


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_it_finds_what_transformers_finds(early_stopping, length_penalty):
    rng = random.Random(7)
    for _ in range(15):
        width = rng.randint(2, 5)
        ends = rng.sample(range(2, 5), rng.randint(0, 3))
        vocab_size = rng.randint(len(ends) + width + 2, 12)
        make = {
            "length_penalty": length_penalty,
            "early_stopping": early_stopping,
            "end_token_ids": ends,
        }
        search = BeamSearch(width, rng.randint(1, 9), **make)
        found, steps = ours(search, vocab_size)
        expected, their_steps = theirs(search, vocab_size)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        assert [score for _, score in found] == pytest.approx(
            [score for _, score in expected], abs=1e-4
        )
        assert steps == their_steps
        assert all(
            len(h.token_ids) == search.max_tokens
            for h in search.hypotheses
            if h.finish_reason == "length"
        )
        assert all(
            (h.token_ids[-1] in ends) == (h.finish_reason == "stop") for h in search.hypotheses
        )


def advance(search: BeamSearch, *candidates: dict[int, float]) -> list[tuple[int, int]]:
    beams = [Beam([7] * 2, 0.0)] * len(candidates)
    extensions = search.advance(
        beams, [Candidates(list(one), list(one.values())) for one in candidates]
    )
    return [(e.parent, e.token_id) for e in extensions]


def test_of_equals_the_earlier_beam_comes_first():
    assert advance(BeamSearch(2, 9), {5: -1.0, 4: -1.0}, {3: -1.0}) == [(0, 5), (0, 4)]
    assert advance(BeamSearch(2, 9), {5: -1.0, 4: -2.0}, {3: -1.0}) == [(0, 5), (1, 3)]


def test_an_end_below_the_first_width_is_dropped():
    search = BeamSearch(2, 9, end_token_ids=[1])
    assert advance(search, {5: -1.0, 4: -2.0, 1: -3.0, 3: -4.0}) == [(0, 5), (0, 4)]
    assert search.hypotheses == []
    assert advance(search, {5: -1.0, 1: -2.0, 4: -3.0}) == [(0, 5), (0, 4)]
    assert [h.token_ids for h in search.hypotheses] == [[7, 7, 1]]


def test_masks_may_leave_fewer_beams_than_width():
    search = BeamSearch(3, 3)
    assert advance(search, {}, {4: -1.0}) == []
    assert [h.token_ids for h in search.hypotheses] == [[7, 7, 4]]
    search = BeamSearch(3, 9)
    assert advance(search, {}, {4: -1.0}) == [(1, 4)]
    assert advance(search, {}, {}) == []


def test_more_than_the_best_width_are_not_kept():
    search = BeamSearch(2, 9, end_token_ids=[1, 2])
    assert search.num_candidates == 6
    assert advance(search, {1: -1.0, 2: -2.0, 5: -3.0}) == []
    assert [h.logprob for h in search.hypotheses] == [-1.0, -2.0]
    assert search.hypotheses[0].score == pytest.approx(-1 / 3)
