"""Models that see: compiled for any number of tokens, with pictures among them and without, they
give the tokens that they give without a compiler."""

from __future__ import annotations

import json

import pytest
from given_renderer import Given
from qwen_harness import picture, prompt_of, random_qwen, rules_of
from toolkit_lm import LLM, SamplingParams


def answers(folder, prompts, level):
    options = {"compilation_config": json.dumps({"backend": "eager"})} if level else {}
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    with LLM(
        str(folder),
        plugins=[Given()],
        renderer="given",
        dtype="float32",
        kernels="torch",
        num_kv_blocks=64,
        max_num_seqs=4,
        max_model_len=64,
        optimization_level=level,
        **options,
    ) as llm:
        compiler = llm.engine.client.core.executor.runner.compiler
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert (compiler is not None) == bool(level)
        assert not level or compiler.num_eager_steps == 0
    return [list(output.outputs[0].token_ids) for output in outputs]


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
    assert answers(tmp_path / "model", prompts, 1) == answers(tmp_path / "model", prompts, 0)
