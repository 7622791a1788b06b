"""The backend passes the conformance kit; and what only it must do."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from toolkit_lm.attention import AttentionType
from toolkit_lm_devkit import AttentionBackendConformance, AttentionStep
from toolkit_lm_devkit.attention import BATCHES
from toolkit_lm_sdpa.backend import SdpaBackend
from torch.nn.functional import scaled_dot_product_attention


class TestSdpa(AttentionBackendConformance):
    backend = SdpaBackend


make_step = TestSdpa.step


def torch_sdpa(step: AttentionStep) -> torch.Tensor:
    """Plain attention of a decoder step, row by row, by torch."""
    outputs = []
    for q, k, v in zip(step.q, step.k, step.v, strict=True):
        visible = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        repeats = q.shape[1] // k.shape[1]
        # Four axes, as models call it: with three, torch's CPU kernel is another one.
        q, k, v = (
            x[None].transpose(1, 2)
            for x in (q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1))
        )
        outputs.append(
            scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=step.layer.params.scale)[
                0
            ].transpose(0, 1)
        )
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("sharpness", [1.0, 8.0], ids=lambda s: f"sharpness {s}")
@pytest.mark.parametrize("batch", list(BATCHES))
@pytest.mark.parametrize("explicit", [False, True], ids=["kernel", "formula"])
def test_half_precision_is_as_exact_as_torch(dtype, sharpness, batch, explicit) -> None:
    step = make_step(batch=batch, dtype=dtype, heads=(6, 2), head_size=64, seed=3)
    step.layer.params = replace(step.layer.params, scale=step.layer.params.scale * sharpness)
    if explicit:
        step.layer.params = replace(
            step.layer.params, bias=lambda q, k: torch.zeros(6, len(q), len(k))
        )
    truth = step.naive()
    ours, theirs = (
        np.linalg.norm(out.double().numpy() - truth) for out in (step.run(), torch_sdpa(step))
    )
    assert ours <= 1.5 * theirs


@pytest.mark.parametrize("kind", ["decoder", "uncached", "encoder"])
@pytest.mark.parametrize("window", [None, 8])
def test_kernel_and_formula_agree(kind, window) -> None:
    step = make_step(kind=kind, window=window)
    fast = step.run()
    step.layer.params = replace(step.layer.params, soft_cap=1e6)
    assert (step.run() - fast).abs().max() <= 1e-5


@pytest.mark.parametrize("window", [None, 100])
def test_kernels_are_few(monkeypatch, window) -> None:
    """torch keeps a kernel for each pair of lengths that it has seen, and forgets none."""
    seen = set()

    def spy(q, k, *args, **options):
        seen.add(k.shape[-2])
        return scaled_dot_product_attention(q, k, *args, **options)

    monkeypatch.setattr("toolkit_lm_paged_attention.fused.scaled_dot_product_attention", spy)
    for cached in range(1, 300, 7):
        monkeypatch.setitem(BATCHES, "chunk", [(50, cached + 50)])
        step = make_step(batch="chunk", window=window)
        assert np.abs(step.run().double().numpy() - step.naive()).max() <= 1e-5
    assert len(seen) <= 6


def test_long_rows_are_computed_in_parts(monkeypatch) -> None:
    step = make_step(batch="chunks", bias="alibi", sinks=True, window=8)
    whole = step.run()
    monkeypatch.setattr("toolkit_lm_sdpa.backend._CHUNK_SCORES", 500)
    assert (step.run() - whole).abs().max() <= 1e-6


def test_large_scores_do_not_overflow() -> None:
    step = make_step(sinks=True)
    step.layer.params = replace(step.layer.params, scale=1e4)
    assert np.abs(step.run().numpy() - step.naive()).max() <= 1e-4


def test_a_row_without_keys_gives_zeros() -> None:
    step = AttentionStep(SdpaBackend, [(1, 0), (3, 5), (2, 0), (1, 9)], type=AttentionType.CROSS)
    out = step.run()
    assert not out[0].any()
    assert not out[4:6].any()
    assert np.abs(out.numpy() - step.naive()).max() <= 1e-5
