"""The backend against the naive formula, and what it refuses."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from toolkit_lm.attention import AttentionSpec, AttentionType
from toolkit_lm.kv import FullSpec
from toolkit_lm_cpu import backend, library
from toolkit_lm_cpu.backend import CpuBackend
from toolkit_lm_devkit import AttentionStep, assert_bf16_error
from torch.nn.functional import scaled_dot_product_attention

SPEC = AttentionSpec(
    layer="encoder.layer.0.attention.self.attn",
    type=AttentionType.ENCODER,
    num_heads=4,
    num_kv_heads=4,
    head_size=32,
    dtype="float32",
    device="cpu",
    kv_cache=None,
)
BATCHES = {
    "one token": [1],
    "around a vector": [15, 16, 17, 31, 32, 33],
    "around a block of rows": [7, 8, 9, 1, 2],
    "several blocks": [70, 5, 130],
}


def make_step(lengths, **options) -> AttentionStep:
    return AttentionStep(
        CpuBackend,
        [(length, length) for length in lengths],
        type=AttentionType.ENCODER,
        cached=False,
        **options,
    )


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("batch", list(BATCHES))
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("head_size", [5, 16, 32, 48, 72, 128])
def test_is_attention(batch, heads, head_size) -> None:
    step = make_step(BATCHES[batch], heads=heads, head_size=head_size)
    assert np.abs(step.run().numpy() - step.naive()).max() <= 1e-5


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("batch", list(BATCHES))
@pytest.mark.parametrize("head_size", [9, 16, 48, 64, 72])
@pytest.mark.parametrize("sharpness", [1.0, 8.0])
def test_bfloat16_is_as_exact_as_torch(batch, head_size, sharpness) -> None:
    step = make_step(
        BATCHES[batch], heads=(4, 4), head_size=head_size, dtype=torch.bfloat16, seed=3
    )
    step.layer.params = replace(step.layer.params, scale=step.layer.params.scale * sharpness)
    rows = zip(step.q, step.k, step.v, strict=True)
    theirs = [
        scaled_dot_product_attention(
            *(x[None].transpose(1, 2) for x in row), scale=step.layer.params.scale
        )[0]
        for row in rows
    ]
    truth = step.naive()
    errors = [
        np.linalg.norm(o.double().numpy() - truth)
        for o in (step.run(), torch.cat([x.transpose(0, 1) for x in theirs]))
    ]
    assert errors[0] <= 1.5 * errors[1]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_scores_do_not_overflow_and_tiny_weights_vanish(dtype) -> None:
    step = make_step([40], heads=(2, 2), head_size=16, dtype=dtype)
    step.layer.params = replace(step.layer.params, scale=1e4)
    found = step.run()
    assert torch.isfinite(found).all()
    # Each query's best key takes it all.
    best = (step.q[0].float().transpose(0, 1) @ step.k[0].float().permute(1, 2, 0)).argmax(-1)
    expected = torch.stack([step.v[0][best[head], head] for head in range(2)], 1)
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("isa")
def test_what_is_not_a_number_stays_so_and_stays_where_it_is() -> None:
    step = make_step([9, 20, 9], heads=(2, 2), head_size=16)
    whole = step.run()
    step.k[1][3, 0, 5] = float("nan")
    broken = step.run()
    assert broken[9:29, 0].isnan().all()
    assert torch.equal(broken[9:29, 1], whole[9:29, 1])
    assert torch.equal(broken[:9], whole[:9])
    assert torch.equal(broken[29:], whole[29:])


@pytest.mark.usefixtures("isa")
def test_a_sequence_is_computed_the_same_whatever_is_beside_it() -> None:
    together = make_step([30, 7, 64, 7], heads=(4, 2), head_size=32)
    whole = together.run()
    start = 0
    for i, length in enumerate([30, 7, 64, 7]):
        alone = make_step([length], heads=(4, 2), head_size=32)
        alone.q[0] = together.q[i]
        alone.k[0] = together.k[i]
        alone.v[0] = together.v[i]
        assert torch.equal(alone.run(), whole[start : start + length])
        start += length


@pytest.mark.skipif(library.refusal() is not None, reason=str(library.refusal()))
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "cuda"}, "no kernel for device cuda"),
        ({"type": "sideways"}, "no attention of type 'sideways', only of decoder, encoder, cross"),
        ({"dtype": "float64"}, "no kernel for float64, only for float32, float16, bfloat16"),
        ({"head_size": 513}, "head_size 513 is above 512"),
        (
            {
                "head_size": 40,
                "kv_cache": FullSpec(block_size=16, num_kv_heads=4, head_size=40, dtype="float32"),
            },
            "head_size 40 is not a multiple of 16, as what is cached must be",
        ),
        (
            {"kv_cache": FullSpec(block_size=24, num_kv_heads=4, head_size=32, dtype="float32")},
            "block_size 24 is not a multiple of 16",
        ),
        ({"spans": True}, "spans are of decoders, and this is attention of type 'encoder'"),
        (
            {"type": AttentionType.CROSS, "bias": True},
            "bias relates positions of one sequence, and cross attention has two",
        ),
    ],
)
def test_refusals(change, reason) -> None:
    assert CpuBackend.refuses(SPEC) is None
    assert CpuBackend.refuses(msgspec.structs.replace(SPEC, **change)) == reason


def test_without_kernels_it_says_why(monkeypatch) -> None:
    monkeypatch.setattr(library, "_missing", "its kernels are not there (a reason)")
    monkeypatch.setattr(backend, "usable_types", dict)
    assert CpuBackend.refuses(SPEC) == "its kernels are not there (a reason)"


@pytest.mark.parametrize(
    ("type", "head_size", "heads"),
    [(AttentionType.DECODER, 24, (6, 2)), (AttentionType.ENCODER, 500, (2, 1))],
)
def test_heads_that_zeros_fill_up(dtype, type, head_size, heads) -> None:
    """In each type; windows of several spans; and their neighbours' elements stay what they are."""
    rows = [(300, 300), (1, 1), (70, 70)]
    step = AttentionStep(
        CpuBackend,
        rows,
        type=type,
        cached=False,
        heads=heads,
        head_size=head_size,
        dtype=dtype,
        window=280,
    )
    found = step.run()
    exact = torch.from_numpy(step.naive())
    if dtype is torch.float32:
        assert (found - exact).abs().max() <= 1e-5
    else:
        assert_bf16_error([found], [step.eager()], [exact])


@pytest.mark.usefixtures("isa")
def test_tokens_that_are_not_seen() -> None:
    rows = [(32, 4), (7, 7), (32, 19), (9, 1), (40, 33)]
    step = AttentionStep(
        CpuBackend, rows, type=AttentionType.ENCODER, cached=False, heads=(4, 2), head_size=32
    )
    assert np.abs(step.run().numpy() - step.naive()).max() <= 1e-5
