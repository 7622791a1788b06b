"""The backend against the naive formula, over types, shapes, features and batches."""

import numpy as np
import pytest
import torch
from llm_toolkit.attention import AttentionType
from torch.nn.functional import scaled_dot_product_attention

from .harness import Step, all_pairs

BATCHES = {
    "decode": [(1, 23), (1, 1), (1, 40), (1, 16), (1, 17)],
    "uneven": [(1, 3), (1, 150), (1, 70)],
    "prefill": [(19, 19), (1, 1), (33, 33)],
    "chunks": [(7, 20), (16, 48), (2, 30)],
    "mixed": [(1, 20), (18, 18), (5, 29), (1, 35), (1, 1), (9, 16)],
}
SPANS = [(2, 6), (12, 19), (25, 31)]
FACTORS = {
    "kind": ["decoder", "uncached", "encoder", "cross"],
    "batch": list(BATCHES),
    "heads": [(4, 4), (6, 2), (4, 1)],
    "head_size": [16, 64, 80],
    "block_size": [1, 16, 17],
    "window": [None, 1, 8],
    "soft_cap": [None, 2.0],
    "sinks": [False, True],
    "bias": [None, "alibi", "table"],
    "spans": [False, True],
}


def make_step(kind: str = "decoder", batch: str = "mixed", spans: bool = False, **options) -> Step:
    rows = BATCHES[batch]
    if kind in ("uncached", "encoder"):
        rows = [(keys, keys) for _, keys in rows]
    # A span is whole in the keys that are there: the scheduler does not cut it.
    spans_of_rows = [[s for s in SPANS if s[1] <= keys] for _, keys in rows] if spans else None
    type = AttentionType.DECODER if kind == "uncached" else AttentionType(kind)
    return Step(rows, type=type, cached=kind in ("decoder", "cross"), spans=spans_of_rows, **options)


def makes_sense(case) -> bool:
    return case["kind"] != "cross" or not (case["window"] or case["bias"] or case["spans"])


def label(case) -> str:
    return " ".join(str(value) for value in case.values())


@pytest.mark.parametrize("case", all_pairs(FACTORS, makes_sense), ids=label)
def test_equals_the_naive_formula(case) -> None:
    step = make_step(**case)
    assert np.abs(step.run().numpy() - step.naive()).max() <= 1e-5


def torch_sdpa(step: Step) -> torch.Tensor:
    """Plain attention of a decoder step, row by row, by torch."""
    outputs = []
    for q, k, v in zip(step.q, step.k, step.v, strict=True):
        visible = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        repeats = q.shape[1] // k.shape[1]
        # Four axes, as models call it: with three, torch's CPU kernel is another one.
        q, k, v = (x[None].transpose(1, 2) for x in (q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)))
        outputs.append(scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=step.layer.scale)[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sharpness", [1.0, 8.0], ids=lambda s: f"sharpness {s}")
@pytest.mark.parametrize("batch", list(BATCHES))
@pytest.mark.parametrize("explicit", [False, True], ids=["kernel", "formula"])
def test_half_precision_is_as_exact_as_torch(dtype, sharpness, batch, explicit) -> None:
    step = make_step(batch=batch, dtype=dtype, heads=(6, 2), head_size=64, seed=3)
    step.layer.scale *= sharpness
    if explicit:
        step.layer.bias = lambda q, k: torch.zeros(6, len(q), len(k))
    truth = step.naive()
    ours, theirs = (np.linalg.norm(out.double().numpy() - truth) for out in (step.run(), torch_sdpa(step)))
    assert ours <= 1.5 * theirs


@pytest.mark.parametrize("kind", ["decoder", "uncached", "encoder"])
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("spans", [False, True])
def test_kernel_and_formula_agree(kind, window, spans) -> None:
    step = make_step(kind=kind, window=window, spans=spans)
    fast = step.run()
    step.layer.soft_cap = 1e6
    assert (step.run() - fast).abs().max() <= 1e-5


def test_long_rows_are_computed_in_parts(monkeypatch) -> None:
    step = make_step(batch="chunks", bias="alibi", sinks=True, window=8)
    whole = step.run()
    monkeypatch.setattr("llm_toolkit_sdpa.backend._CHUNK_SCORES", 500)
    assert (step.run() - whole).abs().max() <= 1e-6


def test_large_scores_do_not_overflow() -> None:
    step = make_step(sinks=True)
    step.layer.scale = 1e4
    assert np.abs(step.run().numpy() - step.naive()).max() <= 1e-4


def test_a_row_without_keys_gives_zeros() -> None:
    step = Step([(1, 0), (3, 5), (2, 0), (1, 9)], type=AttentionType.CROSS)
    out = step.run()
    assert not out[0].any()
    assert not out[4:6].any()
    assert np.abs(out.numpy() - step.naive()).max() <= 1e-5


def test_a_batch_with_spans_does_not_touch_a_layer_without() -> None:
    step = make_step(spans=True)
    step.layer.spans = False
    plain = make_step()
    assert torch.equal(step.run(), plain.run())
