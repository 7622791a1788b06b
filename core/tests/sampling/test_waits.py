"""How often the host waits for the device when tokens are drawn: once, whatever is asked for."""

from __future__ import annotations

import pytest
import torch
from fake_cuda import FakeCuda
from toolkit_lm.params import SamplingParams
from toolkit_lm.sampling import greedy_sample, sample, top_candidates

COPY = "aten::_to_copy"
ASKED = {
    "temperature": 0.7,
    "min_p": 0.02,
    "repetition_penalty": 1.5,
    "presence_penalty": 1.0,
    "frequency_penalty": 0.5,
    "bad_words": ["a"],
    "logit_bias": {5: 3.0, 6: -3.0},
    "allowed_token_ids": list(range(0, 64, 2)),
    "min_tokens": 9,
    "logprobs": 3,
    "logprob_token_ids": [3, 4],
    "top_k": 20,
    "top_p": 0.8,
}
MORE = {
    # Whether the first tokens hold all that is kept.
    "top_k": ["aten::nonzero"],
    "top_p": ["aten::nonzero"],
    # Log probabilities of tokens that a row names.
    "logprob_token_ids": [COPY],
}
ELSEWHERE = {
    *(
        "n",
        "best_of",
        "use_beam_search",
        "beam_width",
        "length_penalty",
        "early_stopping",
        "seed",
        "max_tokens",
    ),
    *(
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "truncate_prompt_tokens",
        "prompt_logprobs",
    ),
    *("detokenize", "skip_special_tokens", "output_kind"),
    # Arguments of plugins' logits processors.
    *("extra_args", "structured_outputs"),
}
"""Columns that `sample` does not read."""


def both(logits: torch.Tensor, compute):
    """Waits of the host while `compute` runs on the device. Its result must equal the CPU's."""
    expected = compute(logits)
    with FakeCuda() as cuda:
        given = logits.to("cuda")
        cuda.waits.clear()
        found = compute(given)
        waits = list(cuda.waits)
    assert found == expected
    return waits


def test_every_parameter_is_here():
    assert ASKED.keys() | ELSEWHERE == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("name", ASKED)
def test_a_draw_waits_once(make_rows, make_logits, name):
    params = [
        SamplingParams(**{"temperature": 0.9, "max_tokens": 99, name: ASKED[name]}),
        SamplingParams(),
        SamplingParams(temperature=0),
    ]

    def compute(logits):
        words = [[[9], [6, 7]] if p.bad_words else [] for p in params]
        rows = make_rows(
            *params,
            prompts=[[1, 2]] * 3,
            outputs=[[5, 6, 5]] * 3,
            seeds=[3, 4, 5],
            stops=[[4, 8]] * 3,
            bad_words=words,
        )
        return sample(logits, rows)

    logprobs = [COPY] if "logprob" in name else []
    assert sorted(both(make_logits(3), compute)) == sorted([COPY, *logprobs, *MORE.get(name, [])])


def test_a_row_that_is_not_finite_fails_without_a_wait_of_its_own(make_rows, make_logits):
    logits = make_logits(4)
    logits[1, 3] = torch.nan
    logits[2, :] = -torch.inf
    params = [
        SamplingParams(),
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(top_k=3),
    ]

    def compute(logits):
        return sample(logits, make_rows(*params, seeds=[3, 4, 5, 6]))

    assert list(compute(logits).errors) == [1, 2]
    why = ["aten::_local_scalar_dense", "aten::is_nonzero"]
    assert [one for one in both(logits, compute) if one not in why][:2] == ["aten::nonzero", COPY]


def test_greedy_tokens_wait_once(make_logits):
    def compute(logits):
        return greedy_sample(*torch.max(logits, dim=-1))

    assert both(make_logits(4), compute) == [COPY]


def test_candidates_wait_once(make_rows, make_logits):
    rows = make_rows(SamplingParams(), SamplingParams())
    rows.num_candidates[:] = [2, 5]
    assert both(make_logits(2), lambda logits: top_candidates(logits, rows)) == [COPY]
