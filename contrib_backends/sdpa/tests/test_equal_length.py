"""Sequences of equal length in an encoder: computed together, whatever lies between them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from toolkit_lm.attention import AttentionType
from toolkit_lm_devkit import AttentionStep
from toolkit_lm_sdpa.backend import SdpaBackend
from toolkit_lm_sdpa.equal_length import _parts
from toolkit_lm_sdpa.plan import EqualLengthRows
from torch.nn.functional import scaled_dot_product_attention

BATCHES = {
    "equal": [9] * 7,
    "mixed": [9, 30, 9, 1, 30, 9, 9, 1, 9],
    "long": [150, 20, 150, 20, 129, 128, 128],
    "all different": [3, 17, 40],
}


def make_step(lengths, **options) -> AttentionStep:
    return AttentionStep(
        SdpaBackend,
        [(length, length) for length in lengths],
        type=AttentionType.ENCODER,
        cached=False,
        **options,
    )


@pytest.mark.parametrize(
    "batch", ["equal", "mixed", pytest.param("long", marks=pytest.mark.slow), "all different"]
)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("bias", [None, "alibi", "table"])
@pytest.mark.parametrize("window", [None, 20])
def test_is_attention(batch, heads, bias, window) -> None:
    step = make_step(BATCHES[batch], heads=heads, head_size=16, bias=bias, window=window)
    assert np.abs(step.run().numpy() - step.naive()).max() <= 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("sharpness", [1.0, 8.0])
def test_half_precision_is_as_exact_as_torch(dtype, sharpness) -> None:
    step = make_step(
        BATCHES["mixed"], heads=(4, 4), head_size=32, dtype=getattr(torch, dtype), seed=3
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


def test_parts_hold_every_sequence_once() -> None:
    for tokens in (slice(6, 6 + 3 * 23), torch.arange(3 * 23).flip(0)):
        parts = list(_parts(EqualLengthRows(tokens, torch.arange(3)), most=10))
        assert [count for _, count in parts] == [7, 8, 8]
        together = [torch.arange(p.start, p.stop) if isinstance(p, slice) else p for p, _ in parts]
        assert torch.equal(
            torch.cat(together),
            torch.arange(6, 6 + 3 * 23) if isinstance(tokens, slice) else tokens,
        )


def test_parts_of_one_size_give_what_the_whole_gives(monkeypatch) -> None:
    step = make_step(BATCHES["mixed"], heads=(4, 4), head_size=16)
    whole = step.run()
    monkeypatch.setattr("toolkit_lm_sdpa.equal_length._CHUNK_SCORES", 2 * 4 * 9 * 9)
    assert (step.run() - whole).abs().max() <= 1e-6
