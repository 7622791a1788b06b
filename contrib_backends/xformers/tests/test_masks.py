"""The masks of a step, written out, against the definition of each attention type. No GPU is
needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from materialized_masks import written_out
from toolkit_lm.attention import AttentionType, BatchView
from toolkit_lm_devkit.naive import sees
from toolkit_lm_xformers import kernel
from toolkit_lm_xformers.layout import LayerKey, Prepared, prepare

if kernel.missing() is not None:
    pytest.skip(str(kernel.missing()), allow_module_level=True)

DECODE = [(1, 9), (1, 1), (1, 40)]
PREFILL = [(7, 7), (1, 1), (20, 20)]
MIXED = [(1, 20), (18, 18), (5, 29), (1, 1)]
BLOCK = 4
TABLE_STEP = 20
"""Blocks of a row's part of the cache."""


def prepared(rows, type, *, window=None, block_size=None, paged=False) -> Prepared:
    """Metadata of rows of (queries, keys). Row r has the blocks TABLE_STEP * r, TABLE_STEP * r + 1,
    ..."""
    start = np.cumsum([0, *(q for q, _ in rows)], dtype=np.int32)
    seen = np.array([k for _, k in rows], np.int32)
    table = None
    if block_size is not None:
        table = (
            torch.arange(len(rows))[:, None] * TABLE_STEP
            + torch.arange(-(-int(seen.max()) // block_size))
        ).int()
    batch = BatchView(
        query_start=start,
        seq_lens=seen,
        starts=np.zeros(len(rows), np.int64),
        query_start_device=torch.from_numpy(start),
        seq_lens_device=torch.from_numpy(seen),
        block_table=table,
        slot_mapping=None,
        max_query_len=max(q for q, _ in rows),
        max_seq_len=int(seen.max()),
        has_padding=bool((seen == 0).any()),
    )
    return prepare(batch, LayerKey(type, window, block_size, paged))


def seen_keys(found: Prepared, rows) -> dict[int, set[tuple[int, int]]]:
    """The keys (row, position) that each token sees."""
    layout, mask = found
    owner = [
        (row, position) for row, (queries, _) in enumerate(rows) for position in range(queries)
    ]
    if layout.pages is not None:
        keys = [key_at(place) for place in range(2 * BLOCK * TABLE_STEP * len(rows))]
    elif layout.keys is None:
        keys = owner
    else:
        keys = [key_at(place) for place in layout.keys.tolist()]
    tokens = range(len(owner)) if layout.queries is None else layout.queries.tolist()
    seen = written_out(mask, len(tokens), len(keys)).tolist()
    return {
        token: {key for key, is_seen in zip(keys, line, strict=True) if is_seen}
        for token, line in zip(tokens, seen, strict=True)
    }


def key_at(place: int) -> tuple[int, int] | None:
    """(row, position) of a place in the cache, whose blocks hold keys before values; None: a
    value."""
    block, offset = divmod(place, 2 * BLOCK)
    return (block // TABLE_STEP, block % TABLE_STEP * BLOCK + offset) if offset < BLOCK else None


def expected(rows, kind: str, window: int | None = None) -> dict[int, set[tuple[int, int]]]:
    found = {}
    for row, (queries, keys) in enumerate(rows):
        for query in range(queries):
            position = keys - queries + query if kind == "decoder" else query
            seen = {
                (row, key) for key in range(keys) if sees(position, key, kind=kind, window=window)
            }
            if keys:
                found[sum(q for q, _ in rows[:row]) + query] = seen
    return found


@pytest.mark.parametrize("rows", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize(("window", "paged"), [(None, False), (1, False), (6, False), (None, True)])
def test_decoder(rows, window, paged) -> None:
    found = prepared(rows, AttentionType.DECODER, window=window, block_size=BLOCK, paged=paged)
    assert seen_keys(found, rows) == expected(rows, "decoder", window)


@pytest.mark.parametrize("window", [None, 1, 6])
def test_decoder_without_a_cache(window) -> None:
    found = prepared(PREFILL, AttentionType.DECODER, window=window)
    assert found.layout.keys is None
    assert seen_keys(found, PREFILL) == expected(PREFILL, "decoder", window)


def test_which_masks_they_are() -> None:
    def name(rows, type, **fields) -> str:
        return type_name(prepared(rows, type, **fields).mask)

    def type_name(mask) -> str:
        return type(mask).__name__

    decoder = AttentionType.DECODER
    cross = AttentionType.CROSS
    assert name(PREFILL, AttentionType.ENCODER) == "BlockDiagonalMask"
    assert name(PREFILL, decoder) == "BlockDiagonalCausalMask"
    assert name(PREFILL, decoder, window=6) == "BlockDiagonalCausalLocalAttentionMask"
    assert name(MIXED, decoder, block_size=4) == "BlockDiagonalCausalFromBottomRightMask"
    assert (
        name(MIXED, decoder, block_size=4, window=6)
        == "BlockDiagonalCausalLocalAttentionFromBottomRightMask"
    )
    assert (
        name(MIXED, decoder, block_size=4, paged=True)
        == "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask"
    )
    assert name(MIXED, cross, block_size=4) == "BlockDiagonalMask"
    assert name(MIXED, cross, block_size=4, paged=True) == "PagedBlockDiagonalPaddedKeysMask"


@pytest.mark.parametrize("rows", [PREFILL, [(9, 4), (7, 7), (5, 1)]], ids=["all", "some"])
def test_encoder(rows) -> None:
    layout, mask = prepared(rows, AttentionType.ENCODER)
    seen = written_out(mask, sum(q for q, _ in rows), sum(k for _, k in rows))
    starts = np.cumsum([0, *(q for q, _ in rows)])
    own = [starts[row] + key for row, (_, keys) in enumerate(rows) for key in range(keys)]
    assert (layout.keys is None) == (rows is PREFILL)
    assert layout.keys is None or layout.keys.tolist() == own
    for row, (queries, _) in enumerate(rows):
        for token in range(starts[row], starts[row] + queries):
            assert {own[i] for i in seen[token].nonzero()[:, 0].tolist()} == {
                starts[row] + key for key in range(rows[row][1])
            }


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    "rows",
    [[(1, 9), (6, 3), (1, 1), (2, 17)], [(1, 9), (2, 0), (3, 4), (1, 0)]],
    ids=["all", "some without keys"],
)
def test_cross(rows, paged) -> None:
    found = prepared(rows, AttentionType.CROSS, block_size=BLOCK, paged=paged)
    assert seen_keys(found, rows) == expected(rows, "cross")


def test_nothing_to_see() -> None:
    assert prepared([(1, 0), (2, 0)], AttentionType.CROSS, block_size=BLOCK).mask is None
