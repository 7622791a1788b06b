"""Which queries and keys of a step belong together, one sequence after the other, as the block
diagonal masks of xFormers need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from toolkit_lm.attention import AttentionType, BatchView
from toolkit_lm_paged_attention import places_of_keys
from torch import Tensor

from toolkit_lm_xformers.masks import block_diagonal, paged_block_diagonal


class LayerKey(NamedTuple):
    """The properties of a layer, its cache and the kernels that a layout depends on."""

    type: AttentionType | str
    window: int | None
    block_size: int | None
    """Block size of the KV cache. None: nothing is cached."""
    paged: bool
    """Whether the kernels read the cache through the block table. Otherwise the keys are gathered
    for them."""


@dataclass(frozen=True, slots=True)
class Layout:
    """N rows of the step that have keys. Their queries lie one after the other, and so do their
    keys."""

    queries: Tensor | None
    """[Q] int64: indices of the rows' tokens. None: all of the step's."""
    query_lengths: list[int]
    key_lengths: list[int]
    keys: Tensor | None
    """[K] int64: indices of the keys, among the step's tokens or in the cache seen as vectors
    [num_blocks * 2 * block_size, ...].

    None: the step's tokens in order, or `pages`.
    """
    pages: Tensor | None
    """[N, most blocks] int32: pages of the keys. None: the keys are not paged.

    A block of the cache counts as two pages: one of keys, and then one of values.
    """


class Prepared(NamedTuple):
    layout: Layout
    mask: Any
    """Mask of xFormers. None: no row has a key."""


def prepare(batch: BatchView, key: LayerKey) -> Prepared:
    """The layout of a step for such layers, and its mask."""
    layout = make_layout(batch, key)
    device = batch.seq_lens_device.device
    return Prepared(layout, make_mask(layout, key, device) if layout.key_lengths else None)


def make_layout(batch: BatchView, key: LayerKey) -> Layout:
    queries = np.diff(batch.query_start).astype(np.int64)
    keys = batch.seq_lens.astype(np.int64)
    # The masks allow no row without keys, which padding has not.
    rows = np.flatnonzero((keys > 0) & (queries > 0))
    whole = len(rows) == batch.num_rows
    first = np.zeros_like(keys)
    if key.type is AttentionType.DECODER and key.window is not None:
        # The blocks before the window may be gone.
        first = (keys - queries + 1 - key.window).clip(0)
    device = batch.seq_lens_device.device
    own = whole and key.type is not AttentionType.CROSS and bool((queries == keys).all())
    pages = None
    if key.paged and batch.block_table is not None:
        pages = batch.block_table[torch.from_numpy(rows).to(device, non_blocking=True)] * 2
    return Layout(
        queries=None
        if whole
        else places_of_keys(batch, rows, np.zeros_like(rows), queries[rows], None),
        query_lengths=queries[rows].tolist(),
        key_lengths=(keys - first)[rows].tolist(),
        keys=None
        if own or pages is not None
        else places_of_keys(batch, rows, first[rows], (keys - first)[rows], key.block_size),
        pages=pages,
    )


def make_mask(layout: Layout, key: LayerKey, device: torch.device) -> Any:
    """Decoder: causal. Encoder and cross: all queries of a row see all its keys."""
    causal = key.type is AttentionType.DECODER
    if layout.pages is not None:
        assert key.block_size is not None
        return paged_block_diagonal(
            layout.query_lengths, layout.key_lengths, layout.pages, key.block_size, causal=causal
        )
    return block_diagonal(
        layout.query_lengths, layout.key_lengths, device, causal=causal, window=key.window
    )
