"""Decoders and cross attention out of the cache: long contexts, every kernel, and results that do
not depend on what is beside them."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from toolkit_lm.attention import AttentionType
from toolkit_lm_cpu import backend
from toolkit_lm_cpu.backend import CpuBackend
from toolkit_lm_cpu.library import refusal
from toolkit_lm_devkit import AttentionStep, assert_bf16_error

pytestmark = pytest.mark.skipif(refusal() is not None, reason=str(refusal()))

LONG = [(1, 700), (3, 257), (9, 513), (20, 300), (1, 256)]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_step(rows, dtype, **fields) -> AttentionStep:
    return AttentionStep(
        CpuBackend, rows, dtype=dtype, **{"heads": (4, 2), "head_size": 32, **fields}
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"heads": (3, 3), "head_size": 64},
        {"heads": (6, 1), "block_size": 32},
        {"window": 300},
        {"window": 33, "soft_cap": 5.0},
        {"sinks": True},
        {"bias": "alibi"},
        {"spans": True, "window": 300},
        {"spans": True, "sinks": True, "soft_cap": 5.0},
        {"spans": True, "bias": "table"},
        {"type": AttentionType.CROSS},
    ],
    ids=str,
)
def test_contexts_of_several_spans(dtype, fields) -> None:
    step = make_step(LONG, dtype, **fields)
    ours = step.run()
    exact = torch.from_numpy(step.naive())
    assert ours.isfinite().all()
    if dtype is torch.float32:
        assert (ours - exact).abs().max() <= 1e-5
    else:
        assert_bf16_error([ours], [step.eager()], [exact])


@pytest.mark.parametrize("spans", [False, True])
def test_biases_in_pieces(monkeypatch, spans) -> None:
    """Each piece has as many biases as fit, so that pieces begin and end within rows."""
    step = make_step([(30, 40), (1, 9), (17, 17)], torch.float32, bias="table", spans=spans)
    whole = step.run()
    for most in (4 * 40 * 7, 1):
        monkeypatch.setattr(backend, "_MOST_BIASES", most)
        assert torch.equal(step.run(), whole)


def test_soft_caps_of_small_and_large_scores() -> None:
    for scale in (1e-4, 1e-2, 1.0, 100.0):
        step = make_step([(5, 40)], torch.float32, soft_cap=20.0)
        object.__setattr__(step.layer.params, "scale", scale)
        assert np.abs(step.run().numpy() - step.naive()).max() <= 1e-5


def alone(
    whole: AttentionStep, row: int, queries: int | None = None, *, before: int = 0, **fields
) -> AttentionStep:
    """A row of a step by itself: of its queries all, or `queries` of them, but for the last
    `before`."""
    count, keys = whole.rows[row]
    queries = count if queries is None else queries
    shape = {"heads": whole.heads, "head_size": whole.head_size, "window": whole.window}
    step = make_step([(queries, keys - before)], whole.dtype, **shape, **fields)
    end = count - before
    step.q[0] = whole.q[row][end - queries : end]
    step.k[0] = whole.k[row][: keys - before]
    step.v[0] = whole.v[row][: keys - before]
    return step


def long_spans(length: int) -> np.ndarray:
    """Pictures of 256 tokens with 44 others before each."""
    spans = np.stack([np.arange(length), np.arange(length) + 1], axis=1).astype(np.int32)
    for begin in range(44, length - 256, 300):
        spans[begin : begin + 256] = begin, begin + 256
    return spans


@pytest.mark.parametrize("window", [None, 200])
def test_spans_are_the_same_beside_others_and_in_every_chunk(dtype, window) -> None:
    """A span ends with the chunk that it ends in, and may begin before it."""
    rows = [(650, 650), (3, 257), (556, 700)]
    whole = make_step(rows, dtype, window=window, spans=True)
    whole.row_spans = [long_spans(keys) for _, keys in rows]
    out = whole.run()
    exact = torch.from_numpy(whole.naive())
    start = 0
    assert (out - exact).abs().max() <= (1e-5 if dtype is torch.float32 else 0.02)
    for row, (queries, keys) in enumerate(rows):
        end = start + queries
        for chunk, before in (
            (queries, 0),
            (min(queries, 100), 0),
            (100, keys - 300),
            (300, keys - 344),
            (1, keys - 30),
        ):
            if chunk + before > queries:
                continue
            part = alone(whole, row, chunk, before=before, spans=True)
            part.row_spans = [whole.row_spans[row][: keys - before]]
            assert torch.equal(part.run(), out[end - before - chunk : end - before]), (
                row,
                chunk,
                before,
            )
        start = end


@pytest.mark.parametrize("window", [None, 300])
def test_a_row_is_the_same_whatever_is_beside_it(dtype, window) -> None:
    whole = make_step(LONG, dtype, window=window)
    out = whole.run()
    start = 0
    for row, (queries, _) in enumerate(LONG):
        assert torch.equal(alone(whole, row).run(), out[start : start + queries])
        start += queries


@pytest.mark.parametrize("window", [None, 300])
def test_a_token_is_the_same_in_every_chunk(dtype, window) -> None:
    """So that a prompt in chunks, a cached prefix, and tokens that are computed again give what
    they gave."""
    whole = make_step([(300, 600)], dtype, heads=(4, 2), window=window)
    out = whole.run()
    for chunk in (1, 5, 64):
        for before in (0, 17, 236):
            found = alone(whole, 0, chunk, before=before).run()
            assert torch.equal(found, out[300 - before - chunk : 300 - before]), (chunk, before)


def test_the_number_of_threads_changes_nothing(dtype, threads) -> None:
    """Few rows share out the spans of their keys."""
    found = []
    for count in (1, 2, 16):
        torch.set_num_threads(count)
        step = make_step([(1, 1500), (2, 900)], dtype, head_size=64)
        found.append(step.run())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
