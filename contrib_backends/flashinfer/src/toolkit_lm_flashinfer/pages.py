"""Pages of a step for FlashInfer: those that hold the keys of each row. Nothing here needs
FlashInfer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from toolkit_lm.attention import AttentionType, BatchView
from torch import Tensor


class LayerKey(NamedTuple):
    """Properties that layers with a common plan share."""

    type: AttentionType | str
    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None
    soft_cap: float | None


class Pages(NamedTuple):
    """Pages of R rows, one row after the other. All is on the host."""

    page_size: int
    """Keys that a page has room for."""
    indptr: np.ndarray
    """[R + 1] int32: row r has the pages indptr[r] : indptr[r + 1]."""
    last_page_len: np.ndarray
    """[R] int32: keys in the row's last page; 0: the row has no keys."""
    row: np.ndarray
    """[P] int64: the row of each page."""
    position: np.ndarray
    """[P] int64: position of the page's first key in its row."""


def find_pages(batch: BatchView, key: LayerKey, block_size: int | None) -> Pages:
    """The pages of the keys that any query of a step sees. `block_size`: of the cache; None: the
    keys are the step's own.

    A page is a block of the cache; or a single key, where nothing is cached or a window begins amid
    a block. A kernel multiplies what it masks by zero, so that it must not be given slots before
    the window, which may hold NaN.
    """
    num_queries = np.diff(batch.query_start).astype(np.int64)
    num_keys = batch.seq_lens.astype(np.int64)
    first = np.zeros_like(num_keys)
    page_size = block_size or 1
    if key.window is not None:
        first = (num_keys - num_queries + 1 - key.window).clip(0)
        page_size = 1
    counts = -(-(num_keys - first) // page_size)
    indptr = np.concatenate([[0], counts.cumsum()])
    row = np.repeat(np.arange(len(counts)), counts)
    last_page_len = num_keys - first - (counts - 1).clip(0) * page_size
    position = first[row] + (np.arange(indptr[-1]) - indptr[row]) * page_size
    return Pages(page_size, indptr.astype(np.int32), last_page_len.astype(np.int32), row, position)


def page_ids(pages: Pages, batch: BatchView, block_size: int | None, *, are_keys: bool) -> Tensor:
    """Indices of the pages, [P] int32, on the step's device.

    They index the step's tokens if nothing is cached, else the cache's blocks. `are_keys`: they
    index single keys, in the cache seen as vectors [num_blocks * 2 * block_size, ...]. Each block
    holds keys before values.
    """
    device = batch.seq_lens_device.device
    if block_size is None:
        return _to(batch.query_start[pages.row] + pages.position, device)
    table = batch.block_table
    assert table is not None
    blocks = table.reshape(-1).index_select(
        0, _to(pages.row * table.shape[1] + pages.position // block_size, device)
    )
    return (
        blocks * (2 * block_size) + _to(pages.position % block_size, device) if are_keys else blocks
    )


def _to(numbers: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int32)).to(device, non_blocking=True)
