"""The arguments of FlashAttention, as masks: which keys of the step each query sees. No GPU is
needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from stand_in_kernel import visible
from toolkit_lm.attention import AttentionType, BatchView
from toolkit_lm_devkit.naive import sees
from toolkit_lm_flash_attn.arguments import Arguments, LayerKey, make_arguments

DECODE = [(1, 9), (1, 1), (1, 40)]
PREFILL = [(7, 7), (1, 1), (20, 20)]
MIXED = [(1, 20), (18, 18), (5, 29), (1, 1)]
WINDOWS = [None, 1, 6]


def make_batch(rows, block_size: int | None = None, padding: int = 0) -> BatchView:
    """Rows of (queries, keys). Row r has the blocks 100 * r, 100 * r + 1, ..."""
    counts = [*(q for q, _ in rows), *[1] * padding]
    lengths = [*(k for _, k in rows), *[0] * padding]
    start = np.cumsum([0, *counts], dtype=np.int32)
    seen = np.array(lengths, np.int32)
    table = None
    if block_size is not None:
        table = (
            torch.arange(len(counts))[:, None] * 100 + torch.arange(-(-max(lengths) // block_size))
        ).int()
    return BatchView(
        query_start=start,
        seq_lens=seen,
        starts=np.zeros(len(counts), np.int64),
        query_start_device=torch.from_numpy(start),
        seq_lens_device=torch.from_numpy(seen),
        block_table=table,
        slot_mapping=None,
        max_query_len=max(counts),
        max_seq_len=max(lengths),
        has_padding=padding > 0,
    )


def made(rows, type, *, window=None, block_size=None, paged=False, padding=0) -> Arguments:
    return make_arguments(
        make_batch(rows, block_size, padding), LayerKey(type, window, block_size, paged)
    )


def seen_keys(given: Arguments, rows, block_size: int | None) -> list[set[tuple[int, int]]]:
    """Per token of the step, the keys (row, position) that it sees by the arguments."""
    owner = [
        (row, position) for row, (queries, _) in enumerate(rows) for position in range(queries)
    ]
    found = []
    for n in range(len(given.query_start) - 1):
        first = int(given.key_start[n])
        for seen in visible(given, n).tolist():
            columns = [i for i, is_seen in enumerate(seen) if is_seen]
            if given.block_table is not None:
                keys = {(int(given.block_table[n][c // block_size]) // 100, c) for c in columns}
            elif given.keys is None:
                keys = {owner[first + c] for c in columns}
            elif block_size is None:
                keys = {owner[int(given.keys[first + c])] for c in columns}
            else:
                keys = {key_at(int(given.keys[first + c]), block_size) for c in columns}
            assert len(keys) == len(columns)
            found.append(keys)
    return found


def key_at(place: int, block_size: int) -> tuple[int, int]:
    """(row, position) of a place in the cache, whose blocks hold keys before values."""
    block, offset = divmod(place, 2 * block_size)
    assert offset < block_size, "a value is taken for a key"
    return block // 100, block % 100 * block_size + offset


def expected(rows, kind: str, window: int | None) -> list[set[tuple[int, int]]]:
    found = []
    for row, (queries, keys) in enumerate(rows):
        for query in range(queries):
            position = keys - queries + query if kind == "decoder" else query
            found.append(
                {(row, key) for key in range(keys) if sees(position, key, kind=kind, window=window)}
            )
    return found


@pytest.mark.parametrize("rows", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("block_size", "paged"), [(4, False), (4, True), (16, False)])
def test_decoder(rows, window, block_size, paged) -> None:
    given = made(rows, AttentionType.DECODER, window=window, block_size=block_size, paged=paged)
    assert given.causal
    assert seen_keys(given, rows, block_size) == expected(rows, "decoder", window)


@pytest.mark.parametrize("window", WINDOWS)
def test_decoder_without_a_cache_is_square_and_causal(window) -> None:
    given = made(PREFILL, AttentionType.DECODER, window=window)
    assert given.causal and given.query_start.tolist() == given.key_start.tolist()
    assert seen_keys(given, PREFILL, None) == expected(PREFILL, "decoder", window)


def test_a_fresh_prefill_reads_no_cache() -> None:
    given = made(PREFILL, AttentionType.DECODER, block_size=4)
    assert given.keys is None and given.block_table is None
    assert given.query_start.tolist() == given.key_start.tolist() == [0, 7, 8, 28]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("rows", [PREFILL, [(9, 4), (7, 7), (5, 1)]], ids=["all", "some"])
def test_encoder_is_not_causal(rows, window) -> None:
    given = made(rows, AttentionType.ENCODER, window=window)
    assert not given.causal
    assert given.window == ((-1, -1) if window is None else (window - 1, window - 1))
    assert seen_keys(given, rows, None) == expected(rows, "encoder", window)


@pytest.mark.parametrize("paged", [False, True])
def test_cross_is_rectangular(paged) -> None:
    rows = [(1, 9), (6, 3), (1, 1), (2, 17)]
    given = made(rows, AttentionType.CROSS, block_size=4, paged=paged)
    assert not given.causal and given.window == (-1, -1)
    assert given.query_start.tolist() == [0, 1, 7, 8, 10]
    assert given.key_start.tolist() == [0, 9, 12, 13, 30]
    assert (given.max_queries, given.max_keys) == (6, 17)
    assert seen_keys(given, rows, 4) == expected(rows, "cross", None)


def test_cross_attention_of_rows_that_share_an_encoder() -> None:
    batch = make_batch([(1, 9), (3, 9)], 4)
    batch.block_table[1] = batch.block_table[0]
    given = make_arguments(batch, LayerKey(AttentionType.CROSS, None, 4, False))
    assert given.keys[:9].tolist() == given.keys[9:].tolist()


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_padding_sees_nothing(paged, window) -> None:
    given = made(DECODE, AttentionType.DECODER, window=window, block_size=4, paged=paged, padding=2)
    assert given.key_start[-3:].tolist() == [int(given.key_start[3])] * 3
    assert seen_keys(given, [*DECODE, (1, 0), (1, 0)], 4) == [
        *expected(DECODE, "decoder", window),
        set(),
        set(),
    ]


def test_blocks_before_the_window_are_not_read() -> None:
    batch = make_batch([(2, 40)], 4)
    batch.block_table[0, :8] = -1
    given = make_arguments(batch, LayerKey(AttentionType.DECODER, 6, 4, False))
    assert [key_at(place, 4)[1] for place in given.keys.tolist()] == list(range(33, 40))


@pytest.mark.parametrize("starts", ["query_start", "key_start"])
def test_starts_are_as_the_kernels_take_them(starts) -> None:
    found = getattr(made(MIXED, AttentionType.DECODER, block_size=4), starts)
    assert (found.dtype, found[0].item(), len(found)) == (torch.int32, 0, len(MIXED) + 1)
