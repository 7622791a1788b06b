"""FlashInfer's arguments for a step let each query see the keys that its attention type defines."""

import numpy as np
import pytest
import torch
from toolkit_lm.attention import AttentionType, BatchView
from toolkit_lm_devkit.naive import sees
from toolkit_lm_flashinfer.pages import LayerKey, find_pages, page_ids

DECODE = [(1, 9), (1, 1), (1, 40)]
PREFILL = [(7, 7), (1, 1), (20, 20)]
MIXED = [(1, 20), (18, 18), (5, 29), (1, 1)]
ROWS = {
    "decode": DECODE,
    "prefill": PREFILL,
    "mixed": MIXED,
    "padded": [*DECODE, (1, 0), (1, 0)],
    "empty": [(3, 0), (0, 0), (2, 5)],
}
every_rows = pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
every_window = pytest.mark.parametrize("window", [None, 1, 6, 100])


def make_batch(rows, block_size: int | None = None) -> BatchView:
    """Rows of (queries, keys). Row r has the blocks 100 * r, 100 * r + 1, ..."""
    counts = [queries for queries, _ in rows]
    lengths = [keys for _, keys in rows]
    start = np.cumsum([0, *counts], dtype=np.int32)
    seen = np.array(lengths, np.int32)
    table = None
    if block_size is not None:
        table = (
            torch.arange(len(counts))[:, None] * 100
            + torch.arange(-(-max(lengths) // block_size) + 2)
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
    )


def key_of(type=AttentionType.DECODER, window=None) -> LayerKey:
    return LayerKey(type, 4, 2, 64, window, None)


def keys_of_rows(rows, key: LayerKey, block_size: int | None) -> list[list[tuple[int, int]]]:
    """Per row, the keys (row, position) that its pages hold, in order."""
    batch = make_batch(rows, block_size)
    pages = find_pages(batch, key, block_size)
    ids = page_ids(pages, batch, block_size, are_keys=key.window is not None)
    assert ids.dtype == torch.int32 and len(ids) == pages.indptr[-1] == len(pages.row)
    found = []
    for row, length in enumerate(pages.last_page_len.tolist()):
        of_row = ids[pages.indptr[row] : pages.indptr[row + 1]].tolist()
        assert (1 <= length <= pages.page_size) if of_row else length == 0
        slots = [
            key_at(one, offset, key, block_size, batch)
            for one in of_row
            for offset in range(pages.page_size)
        ]
        found.append(slots[: len(slots) - pages.page_size + length] if of_row else [])
    return found


def key_at(
    page: int, offset: int, key: LayerKey, block_size: int | None, batch: BatchView
) -> tuple[int, int]:
    """(row, position) of a key in a page."""
    if block_size is None:
        row = int(np.searchsorted(batch.query_start, page, side="right")) - 1
        return row, page - int(batch.query_start[row])
    if key.window is None:
        return page // 100, page % 100 * block_size + offset
    block, inside = divmod(page, 2 * block_size)
    assert inside < block_size, "a value is taken for a key"
    return block // 100, block % 100 * block_size + inside


@every_rows
@every_window
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_decoder_is_given_the_keys_that_its_queries_see(rows, window, block_size) -> None:
    for row, ((queries, keys), found) in enumerate(
        zip(rows, keys_of_rows(rows, key_of(window=window), block_size), strict=True)
    ):
        positions = [keys - queries + query for query in range(queries)]
        seen = {
            key
            for at in positions
            for key in range(keys)
            if sees(at, key, kind="decoder", window=window)
        }
        expected = (
            range(keys) if window is None or not keys else range(min(seen, default=keys), keys)
        )
        assert found == [(row, key) for key in expected]


@pytest.mark.parametrize("kind", [AttentionType.DECODER, AttentionType.ENCODER])
def test_without_a_cache_the_keys_are_the_tokens_of_the_step(kind) -> None:
    assert keys_of_rows(PREFILL, key_of(kind), None) == [
        [(row, key) for key in range(keys)] for row, (_, keys) in enumerate(PREFILL)
    ]


def test_an_encoder_sees_the_first_of_its_tokens_alone() -> None:
    assert keys_of_rows([(9, 4), (7, 7), (5, 0)], key_of(AttentionType.ENCODER), None) == [
        [(0, key) for key in range(4)],
        [(1, key) for key in range(7)],
        [],
    ]


def test_cross_attention_sees_all_keys() -> None:
    rows = [(1, 9), (6, 3), (1, 1), (2, 17)]
    assert [len(one) for one in keys_of_rows(rows, key_of(AttentionType.CROSS), 4)] == [9, 3, 1, 17]


def test_a_row_is_in_its_blocks_and_a_window_in_single_keys() -> None:
    pages = find_pages(make_batch(MIXED, 4), key_of(), 4)
    assert (pages.page_size, pages.indptr.tolist(), pages.last_page_len.tolist()) == (
        4,
        [0, 5, 10, 18, 19],
        [4, 2, 1, 1],
    )
    pages = find_pages(make_batch(MIXED, 4), key_of(window=6), 4)
    assert (pages.page_size, pages.indptr.tolist(), pages.last_page_len.tolist()) == (
        1,
        [0, 6, 24, 34, 35],
        [1, 1, 1, 1],
    )
    assert pages.indptr.dtype == pages.last_page_len.dtype == np.int32


@pytest.mark.parametrize("window", [None, 6])
def test_blocks_before_the_window_are_not_read(window) -> None:
    batch = make_batch([(2, 40)], 4)
    batch.block_table[0, :8] = -1
    ids = page_ids(
        find_pages(batch, key_of(window=window), 4), batch, 4, are_keys=window is not None
    )
    assert (ids < 0).any() == (window is None)


def test_a_table_that_is_part_of_a_wider_one() -> None:
    batch = make_batch(DECODE, 4)
    wide = torch.full((3, 50), -1, dtype=torch.int32)
    wide[:, : batch.block_table.shape[1]] = batch.block_table
    part = wide[:, : batch.block_table.shape[1]]
    pages = find_pages(batch, key_of(), 4)
    view = BatchView(
        **{name: getattr(batch, name) for name in BatchView.__dataclass_fields__}
        | {"block_table": part}
    )
    assert torch.equal(
        page_ids(pages, view, 4, are_keys=False), page_ids(pages, batch, 4, are_keys=False)
    )
