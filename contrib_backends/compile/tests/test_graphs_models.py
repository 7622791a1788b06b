"""Graphs of other models than decoders, by what stands for a graph on a CPU."""

from __future__ import annotations

import json

import encdec_families
import moe_families
import pytest
from given_renderer import Given
from qwen_harness import picture, prompt_of, random_qwen, rules_of
from test_graphs import FULL, NONE, PIECEWISE, StaticBackends, recorder, runner_of
from toolkit_lm import LLM, SamplingParams
from toolkit_lm_devkit import randomize

__all__ = ["recorder"]
LENGTHS = [3, 1, 6]


def engine(folder, mode, **options):
    details = {
        "backend": "eager",
        "cudagraph_mode": mode,
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32],
    }
    plain = {
        "renderer": "tokens",
        "dtype": "float32",
        "kernels": "torch",
        "num_kv_blocks": 64,
        "max_num_seqs": 4,
        "max_model_len": 48,
    }
    level = {"optimization_level": int(mode != "none"), "compilation_config": json.dumps(details)}
    return LLM(str(folder), **{"plugins": [StaticBackends()]} | plain | level | options)


def answers(llm, prompts):
    params = [
        SamplingParams(max_tokens=length, temperature=0, ignore_eos=True) for length in LENGTHS
    ]
    return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]


def ran(llm):
    return {kind for kind, count in runner_of(llm).compiler.graphs.num_replays.items() if count}


def test_experts_run_between_the_parts_on_the_tokens_that_count(tmp_path, recorder):
    family = next(iter(moe_families.FAMILIES))
    theirs = moe_families.make(family, next(iter(moe_families.FAMILIES[family][1])))
    randomize(theirs)
    theirs.save_pretrained(tmp_path)
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 6, 7], [9], [11, 12, 13, 14, 15])]
    expected = answers(engine(tmp_path, "none"), prompts)
    for mode, attention, kinds in (
        ("piecewise", "sdpa", {PIECEWISE}),
        ("full_and_piecewise", "decode", {FULL, PIECEWISE}),
    ):
        llm = engine(tmp_path, mode, attention_backend=attention)
        assert answers(llm, prompts) == expected and ran(llm) == kinds


@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_encoder_decoder_models_have_graphs_of_parts_where_no_encoder_runs(
    tmp_path, recorder, mode, caplog
):
    architecture = next(iter(encdec_families.VARIANTS))
    fields = next(iter(encdec_families.VARIANTS[architecture].values()))
    encdec_families.make_checkpoint(architecture, fields, tmp_path)
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 6, 7], [9], [11, 12, 13, 14, 15])]
    expected = answers(engine(tmp_path, "none"), prompts)
    llm = engine(tmp_path, mode)
    assert answers(llm, prompts) == expected and ran(llm) == {PIECEWISE, NONE}
    assert ("steps of encoder-decoder models differ" in caplog.text) == (mode == "full")


def test_steps_with_images_are_computed_beside_graphs_of_text(tmp_path, recorder):
    """Their positions are [3, T], and steps with images have arguments that no graph is for."""
    theirs = random_qwen("qwen2_vl")
    theirs.save_pretrained(tmp_path)
    rules = rules_of(theirs)
    made = [
        prompt_of(rules, [11, 12, 13], picture(4, 6), [14]),
        prompt_of(rules, [21, 22]),
        prompt_of(rules, [31, 32, 33, 34]),
    ]
    prompts = [
        {"prompt_token_ids": one.token_ids}
        | ({"multi_modal_data": {"features": one.features}} if one.features else {})
        for one in made
    ]
    options = {"renderer": "given", "plugins": [Given(), StaticBackends()]}
    expected = answers(engine(tmp_path, "none", **options), prompts)
    for mode, attention in (("piecewise", "sdpa"), ("full", "decoder=static,encoder=sdpa")):
        llm = engine(tmp_path, mode, attention_backend=attention, **options)
        assert answers(llm, prompts) == expected
        assert ran(llm) == ({FULL, NONE} if mode == "full" else {PIECEWISE, NONE})
