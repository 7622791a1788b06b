"""Models that see: compiled for any number of tokens, with pictures among them and without, they
give the tokens that they give without a compiler."""

from __future__ import annotations

import pytest
from compile_harness import answers
from given_renderer import Given
from qwen_harness import picture, prompt_of, random_qwen, rules_of
from toolkit_lm import SamplingParams


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_a_compiled_family_gives_its_tokens(tmp_path, monkeypatch, family):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    theirs = random_qwen(family)
    theirs.save_pretrained(tmp_path / "model")
    made = prompt_of(rules_of(theirs), [11, 12], picture(4, 6), [13], picture(2, 2))
    prompts = [
        {"prompt_token_ids": [15, 16, 17]},
        {
            "prompt_token_ids": made.token_ids,
            "multi_modal_data": {"features": made.features},
        },
        {"prompt_token_ids": [9]},
    ]
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    compiled, plain = (
        answers(tmp_path / "model", prompts, params, level, plugins=[Given()], renderer="given")
        for level in (1, 0)
    )
    assert compiled == plain
