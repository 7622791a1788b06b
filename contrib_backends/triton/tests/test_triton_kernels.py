"""Tests of these kernels alone: on a GPU, or by Triton's interpreter, with which
`test_interpreter.py` runs them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toolkit_lm.attention import AttentionType, LayerParams
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import GatedColumnParallelLinear, Kernels, Rotation, construction
from toolkit_lm.model.activation import gate
from toolkit_lm_devkit import AttentionStep
from toolkit_lm_triton import backend
from toolkit_lm_triton.backend import TritonBackend
from toolkit_lm_triton.device import interprets, refusal
from toolkit_lm_triton.fused import FusedDecoderLayer
from toolkit_lm_triton.layers import GATES, GatedLinear, TritonKernels
from toolkit_lm_triton.pieces import SPLIT

DEVICE = "cpu" if interprets() else "cuda"
pytestmark = pytest.mark.skipif(
    refusal(DEVICE, "float32") is not None, reason=str(refusal(DEVICE, "float32"))
)
LONG = 2 * SPLIT + 90
MIXED = [(1, LONG), (40, 40), (12, 70), (1, 1), (3, 31)]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def make_step(rows=MIXED, **fields) -> AttentionStep:
    return AttentionStep(TritonBackend, rows, device=DEVICE, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"heads": (4, 1), "sinks": True},
        {"window": SPLIT + 30, "soft_cap": 2.0},
        {"bias": "offsets"},
        {"type": AttentionType.CROSS, "sinks": True},
    ],
    ids=str,
)
def test_keys_that_programs_share(fields) -> None:
    step = make_step([(1, LONG), (2, SPLIT), (1, 1)], **fields)
    assert np.abs(step.run().numpy() - step.naive()).max() <= 1e-5


@pytest.mark.parametrize("fields", [{}, {"sinks": True}], ids=str)
def test_what_a_row_gives_does_not_depend_on_the_rows_beside_it(fields) -> None:
    """A row that is decoded, that is: its keys are shared out in the same way beside longer
    ones."""
    step = make_step([(1, SPLIT + 5), (1, LONG), (20, 20), (1, 3)], **fields)
    whole = step.run()
    first = make_step([(1, SPLIT + 5)], **fields)
    first.q = step.q[:1]
    first.k = step.k[:1]
    first.v = step.v[:1]
    first.layer = step.layer
    assert torch.equal(first.run(), whole[:1])


def test_biases_of_pairs_are_made_for_some_pieces_at_a_time(monkeypatch) -> None:
    step = make_step([(1, 90), (40, 40), (12, 70), (1, 1), (3, 31)], bias="table")
    whole = step.run()
    made = []
    bias = step.layer.params.bias
    step.layer.params = replace(
        step.layer.params, bias=lambda q, k: made.append(len(q)) or bias(q, k)
    )
    monkeypatch.setattr(backend, "_MOST_BIASES", 4 * 90 * 16)
    assert torch.equal(step.run(), whole)
    assert sum(made) == 57 and len(made) > 2 and max(made) <= 32


def test_a_row_without_keys_gives_zeros() -> None:
    step = make_step([(1, 0), (3, 5), (2, 0), (1, 9)], type=AttentionType.CROSS)
    out = step.run()
    assert not out[0].any() and not out[4:6].any()
    assert np.abs(out.numpy() - step.naive()).max() <= 1e-5


def test_large_scores_do_not_overflow() -> None:
    step = make_step([(1, 90), (9, 30)], sinks=True, soft_cap=50.0)
    step.layer.params = replace(step.layer.params, scale=1e4)
    assert np.abs(step.run().numpy() - step.naive()).max() <= 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("activation", GATES)
def test_gates(activation, dtype) -> None:
    x = random(5, 2 * 1100, dtype=dtype) * 4
    ours = TritonKernels().gate(x, activation).double()
    exact = gate(x.double(), activation)
    limit = 2e-6 if dtype is torch.float32 else 1e-3
    torch.testing.assert_close(ours, exact, atol=limit, rtol=limit)


def test_a_gated_layer_uses_the_kernel(monkeypatch) -> None:
    outputs = []
    ours = TritonKernels()
    for kernels in (Kernels(), ours):
        config = VllmConfig.default(dtype="float32")
        with construction(kernels=kernels), torch.device(DEVICE):
            layer = GatedColumnParallelLinear(
                24, 40, activation="silu", vllm_config=config, prefix="mlp"
            )
        layer.requires_grad_(False)
        layer.weight.copy_(random(80, 24))
        outputs.append(layer(random(3, 24, seed=1)))
    assert isinstance(layer.method, GatedLinear)
    torch.testing.assert_close(*outputs, atol=2e-5, rtol=0)
    monkeypatch.setattr(ours, "gate", lambda x, activation: x[:, :40] * 0)
    assert not layer(random(3, 24, seed=1)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_likeliest_of_many_scores(dtype) -> None:
    """Rows are so long that several programs share each."""
    scores = random(5, 9000, dtype=dtype)
    scores[0, [70, 5000, 8999]] = 60
    scores[1, 8999] = 60
    scores[2, 4096] = torch.nan
    scores[3] = -torch.inf
    scores[4, [8, 8500]] = torch.inf
    for given in (scores, scores[:, 1:]):
        best, places = TritonKernels().likeliest(given)
        expected, indices = torch.max(given.cpu(), dim=-1)
        torch.testing.assert_close(best.cpu(), expected, atol=0, rtol=0, equal_nan=True)
        assert places.tolist() == indices.tolist()
        assert (best.dtype, places.dtype) == (dtype, torch.int64)


@pytest.mark.parametrize(
    ("interleaved", "rotated"), [(False, 24), (True, 24), (False, 16), (True, 8)]
)
def test_keys_are_rotated_into_the_cache(interleaved, rotated) -> None:
    tokens = 5
    heads = 4
    kv_heads = 2
    size = 24
    params = LayerParams(
        name="attn",
        attention_type=AttentionType.DECODER,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=size,
        scale=1.0,
    )
    qkv = random(tokens, heads + 2 * kv_heads, size)
    cos = random(tokens, 1, rotated, seed=1)
    sin = random(tokens, 1, rotated, seed=2)
    slots = torch.tensor([7, -1, 0, 15, 8], device=DEVICE)
    expected = qkv.clone()
    cache = torch.zeros(4, 2, 4, kv_heads, size, device=DEVICE)
    Kernels().rotate(expected[:, : heads + kv_heads], cos, sin, interleaved)
    layer = FusedDecoderLayer(
        SimpleNamespace(attn=SimpleNamespace(params=params)), TritonKernels()._kernels
    )
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    layer._rotate_and_store(q, k, v, Rotation(cos, sin, interleaved, Kernels()), (cache,), slots)
    torch.testing.assert_close(q, expected[:, :heads], atol=1e-6, rtol=0)
    wanted = torch.zeros_like(cache)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted[slot // 4, :, slot % 4] = expected[token, heads:].view(2, kv_heads, size)
    torch.testing.assert_close(cache, wanted, atol=1e-6, rtol=0)
