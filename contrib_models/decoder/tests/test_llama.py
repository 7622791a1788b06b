"""Llama gives the logits of transformers, on one rank, on two, and as a pipeline."""

import re
from pathlib import Path

import pytest
import torch
from decoder_families import reference_logits
from toolkit_lm_decoder.llama import LlamaForCausalLM
from toolkit_lm_devkit import Computed, load_checkpoint, logits_of, logits_of_ranks, save_random
from transformers import LlamaConfig, LlamaForCausalLM as Reference, Qwen2Config, Qwen2ForCausalLM

SHAPE = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "grouped": {},
    "multi-head": {"num_key_value_heads": 4},
    "multi-query": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head_dim": {"head_dim": 24},
    "gelu": {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-3},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
}
INPUT_IDS = torch.arange(3, 40)


def reference(**changes) -> Reference:
    return Reference(LlamaConfig(**{**SHAPE, **changes}))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant, tmp_path):
    theirs = reference(**VARIANTS[variant])
    ours = load_checkpoint(LlamaForCausalLM, save_random(tmp_path, theirs))
    expected = reference_logits(theirs, INPUT_IDS)
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits_of([ours], INPUT_IDS), expected, atol=1e-4, rtol=0)


def test_bfloat16_is_no_further_from_float32_than_transformers(tmp_path):
    theirs = reference()
    save_random(tmp_path, theirs)
    exact = reference_logits(theirs.bfloat16().float(), INPUT_IDS)
    allowed = (reference_logits(theirs.bfloat16(), INPUT_IDS).float() - exact).abs().mean() * 1.5
    ours = logits_of([load_checkpoint(LlamaForCausalLM, tmp_path, dtype="bfloat16")], INPUT_IDS)
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - exact).abs().mean() <= allowed


@pytest.mark.parametrize("tied", [False, True])
def test_pipeline_stages_chain_to_the_same_logits(tied, tmp_path):
    theirs = reference(tie_word_embeddings=tied)
    save_random(tmp_path, theirs)
    stages = [
        load_checkpoint(LlamaForCausalLM, tmp_path, rank=rank, pipeline_parallel_size=2)
        for rank in (0, 1)
    ]
    names = [
        {name for name, _ in stage.named_parameters() if ".layers." in name} for stage in stages
    ]
    assert names[0].isdisjoint(names[1])
    torch.testing.assert_close(
        logits_of(stages, INPUT_IDS), reference_logits(theirs, INPUT_IDS), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(
    "variant",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
    ],
    ids=["biases", "shared KV head, tied"],
)
def test_two_ranks_give_the_logits_of_one(variant, tmp_path):
    # 101 tokens do not split evenly: the last rank's vocabulary is padded.
    theirs = reference(**variant)
    checkpoint = save_random(tmp_path / "checkpoint", theirs)
    expected = logits_of([load_checkpoint(LlamaForCausalLM, checkpoint)], INPUT_IDS)
    (of_ranks,) = logits_of_ranks([Computed(LlamaForCausalLM, checkpoint)], INPUT_IDS)
    for ours in of_ranks:
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


def test_the_family_of_the_readme_is_qwen2(tmp_path):
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", readme, re.DOTALL).group(1)
    namespace = {"__name__": "readme"}
    exec(code, namespace)
    theirs = Qwen2ForCausalLM(Qwen2Config(**SHAPE, use_sliding_window=False))
    ours = load_checkpoint(namespace["BiasedForCausalLM"], save_random(tmp_path, theirs))
    torch.testing.assert_close(
        logits_of([ours], INPUT_IDS), reference_logits(theirs, INPUT_IDS), atol=1e-4, rtol=0
    )
