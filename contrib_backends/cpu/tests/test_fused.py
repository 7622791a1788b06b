"""Decoder layers in one call: what their modules give, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit_lm_cpu.fused import FusedDecoderLayer
from toolkit_lm_cpu.layers import CpuKernels
from toolkit_lm_cpu.library import refusal
from toolkit_lm_devkit import make_checkpoint
from toolkit_lm_devkit.generation import generate, pool
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

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
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(attention_bias=True, **SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "window": lambda: Qwen3ForCausalLM(Qwen3Config(use_sliding_window=True, sliding_window=20, max_window_layers=1, **SHAPE)),
}
PROMPTS = [[5, 6, 7], list(range(9, 99)), [8], list(range(200, 240))]


@pytest.fixture(scope="module", params=list(MODELS))
def model(request, tmp_path_factory) -> Path:
    torch.manual_seed(0)
    return make_checkpoint(tmp_path_factory.mktemp(request.param), MODELS[request.param]())


def both(monkeypatch, run: Callable[[], Any]) -> tuple[Any, Any]:
    """With layers in one call, and module by module."""
    calls = []
    call = FusedDecoderLayer.__call__
    monkeypatch.setattr(FusedDecoderLayer, "__call__", lambda self, *given: calls.append(call(self, *given)) or calls[-1])
    fused = run()
    assert calls and all(done is not None for done in calls)
    number = len(calls)
    monkeypatch.setattr(CpuKernels, "fuse", lambda self, parts: None)
    plain = run()
    assert len(calls) == number
    return fused, plain


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_generation(monkeypatch, model, dtype) -> None:
    """Prompts in chunks, and several rows a step."""
    options = {"vocab_size": SHAPE["vocab_size"], "max_tokens": 12, "dtype": dtype, "max_num_batched_tokens": 50, "max_num_seqs": 4}
    fused, plain = both(monkeypatch, lambda: generate(model, PROMPTS, **options))
    assert fused.token_ids == plain.token_ids
    assert all(torch.equal(one, other) for one, other in zip(fused.logprobs, plain.logprobs, strict=True))


def test_pooling(monkeypatch, model) -> None:
    """Without a cache."""
    fused, plain = both(monkeypatch, lambda: pool(model, PROMPTS, dtype="bfloat16"))
    assert all(torch.equal(one, other) for one, other in zip(fused.embeddings, plain.embeddings, strict=True))


def test_other_attention_is_left_to_the_modules(model) -> None:
    by_sdpa = generate(model, PROMPTS, vocab_size=SHAPE["vocab_size"], max_tokens=4, dtype="float32", attention_backend="sdpa")
    by_cpu = generate(model, PROMPTS, vocab_size=SHAPE["vocab_size"], max_tokens=4, dtype="float32")
    for one, other in zip(by_sdpa.logprobs, by_cpu.logprobs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)
