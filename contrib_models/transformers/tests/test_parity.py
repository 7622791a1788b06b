"""Families without a class of ours give transformers' log probabilities through the whole
engine."""

import copy

import pytest
import torch
from fallback_harness import check_parity, generate, reference_logprobs, save
from toolkit_lm.plugin import PluginWarning
from toolkit_lm_devkit import assert_bf16_error, assert_same_logits

SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
DENSE = SHAPE | {"intermediate_size": 96}
GROUPED = DENSE | {"num_key_value_heads": 2}
SPARSE = GROUPED | {"num_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "neox": ("GPTNeoX", DENSE),
    "neox-sequential": (
        "GPTNeoX",
        DENSE
        | {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True},
    ),
    "stablelm": ("StableLm", GROUPED),
    "stablelm-normed": (
        "StableLm",
        GROUPED | {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True},
    ),
    "cohere": ("Cohere", GROUPED | {"logit_scale": 0.3, "use_qk_norm": True}),
    "cohere2": (
        "Cohere2",
        GROUPED | {"sliding_window": 12, "num_hidden_layers": 4, "logit_scale": 2.0},
    ),
    "starcoder2": ("Starcoder2", GROUPED | {"sliding_window": 12}),
    "bigcode": ("GPTBigCode", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "nemotron": ("Nemotron", GROUPED),
    "glm": ("Glm", GROUPED | {"head_dim": 16}),
    "olmoe": ("Olmoe", SPARSE),
    "qwen3-moe": (
        "Qwen3Moe",
        SPARSE | {"moe_intermediate_size": 32, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    ),
    "mixtral": ("Mixtral", GROUPED | {"num_local_experts": 3}),
    "gemma2": (
        "Gemma2",
        GROUPED
        | {
            "head_dim": 24,
            "sliding_window": 12,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 4.0,
        },
    ),
}
WINDOWED = {"cohere2": 64, "gemma2": 64, "starcoder2": 8}
"""Blocks for those with windowed layers, which keep less of a sequence; full layers beside them
draw from the same pool."""


@pytest.mark.parametrize("name", FAMILIES)
def test_fp32_parity(name, tmp_path):
    family, fields = FAMILIES[name]
    model = save(family, tmp_path, **fields)
    check_parity(
        model,
        generate(
            tmp_path,
            model_impl="transformers",
            num_kv_blocks=WINDOWED.get(name),
            preempts=name not in WINDOWED,
        ),
    )


@pytest.mark.parametrize("name", ["stablelm", "cohere"])
def test_bf16_error_is_that_of_transformers(name, tmp_path):
    family, fields = FAMILIES[name]
    model = save(family, tmp_path, dtype=torch.bfloat16, **fields)
    ours = generate(tmp_path, model_impl="transformers")
    exact = reference_logprobs(copy.deepcopy(model).float(), ours)
    theirs = reference_logprobs(model, ours)
    assert not all(map(torch.equal, ours.logprobs, exact))
    assert_bf16_error(ours.logprobs, theirs, exact)


def test_a_fallback_is_taken_by_itself_and_said_to_be(tmp_path):
    model = save("GPTNeoX", tmp_path, **DENSE)
    with pytest.warns(
        PluginWarning,
        match="'GPTNeoXForCausalLM' of .*the fallback 'transformers' runs it. model_impl="
        ".transformers. sil",
    ):
        generated = generate(tmp_path)
    check_parity(model, generated)


def test_llama_by_the_fallback_is_llama_by_its_class(tmp_path):
    model = save("Llama", tmp_path, **GROUPED)
    by_class = generate(tmp_path)
    by_fallback = generate(tmp_path, model_impl="transformers")
    check_parity(model, by_fallback)
    assert by_class.token_ids == by_fallback.token_ids
    for ours, theirs in zip(by_class.logprobs, by_fallback.logprobs, strict=True):
        assert_same_logits(ours, theirs)
