"""Decoder layers in one call: what their modules give, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from toolkit_lm.model import FusibleLayer
from toolkit_lm_cpu.fused import FusedDecoderLayer
from toolkit_lm_cpu.layers import CpuKernels
from toolkit_lm_cpu.library import refusal
from toolkit_lm_devkit import make_checkpoint, randomize
from toolkit_lm_devkit.generation import Generated, generate, pool

pytestmark = pytest.mark.skipif(refusal() is not None, reason=str(refusal()))
SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
WINDOW = {"sliding_window": 20}
KINDS = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True}),
    "window": ("Qwen3", {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}),
    "granite": (
        "Granite",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "residual_multiplier": 0.22,
            "embedding_multiplier": 3.0,
        },
    ),
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": 30, "attn_logit_softcapping": 5.0, **WINDOW}),
    "gemma3": ("Gemma3", {"query_pre_attn_scalar": 30, **WINDOW, **KINDS}),
    "gemma4": (
        "Gemma4",
        {
            "num_hidden_layers": 4,
            "global_head_dim": 64,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 300,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            **WINDOW,
        },
    ),
    # Values of global layers are their keys.
    "gemma4_keys": (
        "Gemma4",
        {
            "global_head_dim": 64,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            **WINDOW,
            **KINDS,
        },
    ),
    "olmo2": ("Olmo2", {"head_dim": 16, "attention_bias": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, **WINDOW}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, **WINDOW, **KINDS}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    ),
}
PROMPTS = [[5, 6, 7], list(range(9, 99)), [8], list(range(200, 240))]
BATCHED = {"max_num_batched_tokens": 50, "max_num_seqs": 4}
"""Prompts in chunks, and several rows a step."""


@pytest.fixture(scope="module", params=list(MODELS))
def model(request, tmp_path_factory) -> Path:
    family, fields = MODELS[request.param]
    model_class = getattr(transformers, f"{family}ForCausalLM")
    # Norms differ too.
    made = model_class(model_class.config_class(**SHAPE | fields))
    randomize(made)
    return make_checkpoint(tmp_path_factory.mktemp(request.param), made)


def both(monkeypatch, run: Callable[[], Any], are_fused: bool = True) -> tuple[Any, Any]:
    """With layers in one call, every one of them, and module by module. `are_fused` False: the
    kernels leave every one of them to its modules."""
    calls = []
    layers = []
    call = FusedDecoderLayer.__call__
    layer_call = FusibleLayer.__call__
    with monkeypatch.context() as patch:
        patch.setattr(
            FusedDecoderLayer,
            "__call__",
            lambda self, *given: calls.append(call(self, *given)) or calls[-1],
        )
        patch.setattr(
            FusibleLayer,
            "__call__",
            lambda self, *given: layers.append(self) or layer_call(self, *given),
        )
        fused = run()
        assert calls and len(calls) == len(layers)
        assert all((done is not None) == are_fused for done in calls)
        number = len(calls)
        patch.setattr(CpuKernels, "fuse", lambda self, parts: None)
        plain = run()
        assert len(calls) == number
    return fused, plain


def complete(model: Path, prompts: list[list[int]] = PROMPTS, **options: Any) -> Generated:
    return generate(model, prompts, vocab_size=SHAPE["vocab_size"], max_tokens=8, **options)


def same(one: Generated, other: Generated) -> bool:
    return one.token_ids == other.token_ids and all(
        torch.equal(a, b) for a, b in zip(one.logprobs, other.logprobs, strict=True)
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_generation(monkeypatch, model, dtype) -> None:
    fused, plain = both(monkeypatch, lambda: complete(model, dtype=dtype, **BATCHED))
    assert same(fused, plain)


def test_float32_is_what_the_reference_backend_gives(monkeypatch, model) -> None:
    """With its attention, layers are left to their modules."""
    fused, plain = both(monkeypatch, lambda: complete(model, dtype="float32", **BATCHED))
    assert same(fused, plain)
    by_sdpa = complete(model, dtype="float32", attention_backend="sdpa")
    for one, other in zip(by_sdpa.logprobs, fused.logprobs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def test_a_sequence_is_the_same_alone(model) -> None:
    together = complete(model, dtype="bfloat16", **BATCHED)
    for row in (0, 1):
        alone = complete(model, [PROMPTS[row]], dtype="bfloat16")
        assert same(alone, Generated([together.token_ids[row]], [together.logprobs[row]], 0))


def test_pooling(monkeypatch, model) -> None:
    """Without a cache. Layers that share keys are left to their modules."""
    fused, plain = both(
        monkeypatch,
        lambda: pool(model, PROMPTS, dtype="bfloat16"),
        not model.name.startswith("gemma4"),
    )
    assert all(
        torch.equal(one, other)
        for one, other in zip(fused.embeddings, plain.embeddings, strict=True)
    )
