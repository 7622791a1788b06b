"""Which queries and keys of a step belong together, one sequence after the other, as the block
diagonal masks of xFormers need them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from toolkit_lm.attention import AttentionType, BatchView
from torch import Tensor

from toolkit_lm_xformers.masks import block_diagonal, paged_block_diagonal


class LayerKey(NamedTuple):
    """The properties of a layer, its cache and the kernels that a layout depends on."""

    type: AttentionType | str
    window: int | None
    block_size: int | None
    """None: nothing is cached."""
    paged: bool
    """The kernels read the cache through the block table. Otherwise the keys are gathered for
    them."""


@dataclass(frozen=True, slots=True)
class Layout:
    """N rows of the step that have keys. Their queries lie one after the other, and so do their
    keys."""

    queries: Tensor | None
    """[Q] int64: their tokens; None: all of the step's."""
    query_lengths: list[int]
    key_lengths: list[int]
    keys: Tensor | None
    """[K] int64: the keys, of the step's tokens, or in the cache, seen as vectors [num_blocks * 2 *
    block_size, ...]. None: the step's tokens themselves, in order, or `pages`.
    """
    pages: Tensor | None
    """[N, most blocks] int32: the blocks of the keys, where a block of the cache is a page of keys
    and then one of values; None: they are not paged.
    """


class Prepared(NamedTuple):
    layout: Layout
    mask: Any
    """Of xFormers; None: no row has a key."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """One step. Layouts are made by the first layer that needs them: the batch knows neither
    windows nor types."""

    batch: BatchView
    stored: Tensor | None
    """[S] int64: the tokens whose keys and values are stored; None: all."""
    _prepared: dict[LayerKey, Prepared] = field(default_factory=dict)
    _slots: dict[int, Tensor] = field(default_factory=dict)

    def slots(self, block_size: int) -> Tensor:
        """[S] int64: where the step's keys go in the cache, seen as vectors [num_blocks * 2 *
        block_size, ...]."""
        if block_size not in self._slots:
            slots = self.batch.slot_mapping
            assert slots is not None
            self._slots[block_size] = key_places(
                slots if self.stored is None else slots[self.stored], block_size
            )
        return self._slots[block_size]

    def prepared(self, key: LayerKey) -> Prepared:
        if key not in self._prepared:
            layout = make_layout(self.batch, key)
            mask = (
                make_mask(layout, key, self.batch.seq_lens_device.device)
                if layout.key_lengths
                else None
            )
            self._prepared[key] = Prepared(layout, mask)
        return self._prepared[key]


def key_places(slots: Tensor, block_size: int) -> Tensor:
    """Where the keys of slots are in a cache whose blocks hold keys and then values. A value is
    block_size after its key."""
    return slots + slots.div(block_size, rounding_mode="floor") * block_size


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
        queries=None if whole else _tokens(batch.query_start[rows], queries[rows], device),
        query_lengths=queries[rows].tolist(),
        key_lengths=(keys - first)[rows].tolist(),
        keys=None
        if own or pages is not None
        else _key_places(batch, key, rows, first[rows], (keys - first)[rows]),
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


def _tokens(first: np.ndarray, counts: np.ndarray, device: torch.device) -> Tensor:
    return _ranges(first, counts, device)[0]


def _ranges(first: np.ndarray, counts: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """first[0], first[0] + 1, ..., counts[0] of them, then those of the others; and of which range
    each is. [counts.sum()] int64 each.

    They are counted on the device: the host sends a few numbers for each range.
    """
    given = np.stack([counts, first - counts.cumsum() + counts])
    num, offset = torch.from_numpy(given).to(device, non_blocking=True)
    total = int(counts.sum())
    owners = torch.repeat_interleave(num, output_size=total)
    return torch.arange(total, device=device) + offset[owners], owners


def _key_places(
    batch: BatchView, key: LayerKey, rows: np.ndarray, first: np.ndarray, counts: np.ndarray
) -> Tensor:
    """[K] int64: the places of the rows' keys, whose positions begin at `first`."""
    device = batch.seq_lens_device.device
    if key.block_size is None:
        return _tokens(batch.query_start[rows] + first, counts, device)
    assert batch.block_table is not None
    positions, owners = _ranges(first, counts, device)
    blocks = batch.block_table[
        torch.from_numpy(rows).to(device, non_blocking=True)[owners], positions // key.block_size
    ].long()
    return key_places(blocks * key.block_size + positions % key.block_size, key.block_size)
