"""What FlashAttention is told of a step: where the queries and keys of each sequence begin, which
of them see each other, and the pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from toolkit_lm.attention import AttentionType, BatchView
from torch import Tensor

_ALL = -1
"""A window without an end."""


class LayerKey(NamedTuple):
    """The properties of a layer, its cache and its kernel that the arguments depend on."""

    type: AttentionType | str
    window: int | None
    block_size: int | None
    """None: nothing is cached."""
    paged: bool
    """The kernel reads the cache through the block table. Otherwise the keys are gathered for
    it."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """N sequences, as `sequences` finds them. Their queries lie one after the other, and so do
    their keys.

    The last query of a sequence is at the last of its keys, and the others lie before it: so are
    `causal` and `window` meant.
    """

    query_start: Tensor
    """[N + 1] int32, the kernels' cu_seqlens_q: sequence n has the tokens query_start[n] :
    query_start[n + 1] of the step."""
    key_start: Tensor
    """[N + 1] int32, cu_seqlens_k: likewise, of `keys`; with pages only the numbers of keys
    count."""
    max_queries: int
    max_keys: int
    causal: bool
    window: tuple[int, int]
    """Keys before and after its own that a query sees; -1: all."""
    keys: Tensor | None
    """[K] int64: the keys, of the step's tokens, or in the cache, seen as vectors [num_blocks * 2 *
    block_size, ...]. None: the step's tokens themselves, in order, or `block_table`.
    """
    block_table: Tensor | None
    """[N, most blocks] int32: the keys' pages; None: they are not paged."""


class Sequences(NamedTuple):
    """Where the queries and keys of sequences are. Each array is [N] int64."""

    row: np.ndarray
    num_queries: np.ndarray
    first_key: np.ndarray
    """Its position in the row."""
    num_keys: np.ndarray


@dataclass(frozen=True, slots=True)
class Metadata:
    """One step. The arguments are made by the first layer that needs them: the batch knows neither
    windows nor types."""

    batch: BatchView
    stored: Tensor | None
    """[S] int64: the tokens whose keys and values are stored; None: all."""
    _arguments: dict[LayerKey, Arguments] = field(default_factory=dict)
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

    def arguments(self, key: LayerKey) -> Arguments:
        if key not in self._arguments:
            self._arguments[key] = make_arguments(self.batch, key)
        return self._arguments[key]


def key_places(slots: Tensor, block_size: int) -> Tensor:
    """Where the keys of slots are in a cache whose blocks hold keys and then values. A value is
    block_size after its key."""
    return slots + slots.div(block_size, rounding_mode="floor") * block_size


def make_arguments(batch: BatchView, key: LayerKey) -> Arguments:
    """Decoder: square and causal, or with keys of earlier steps. Encoder: square. Cross: as many
    keys as the encoder has tokens."""
    found = sequences(batch, key)
    device = batch.seq_lens_device.device
    causal = key.type is AttentionType.DECODER
    reach = _ALL if key.window is None else key.window - 1
    keys = None if key.paged or _own(batch, key) else _key_places(batch, key, found)
    return Arguments(
        query_start=_starts(found.num_queries, device),
        key_start=_starts(found.num_keys, device),
        max_queries=int(found.num_queries.max(initial=0)),
        max_keys=int(found.num_keys.max(initial=0)),
        causal=causal,
        window=(reach, 0 if causal else reach),
        keys=keys,
        block_table=batch.block_table if key.paged else None,
    )


def sequences(batch: BatchView, key: LayerKey) -> Sequences:
    """The rows; but in an encoder with a window, each query after the keys is a sequence of its
    own, with the keys that it sees."""
    num_queries = np.diff(batch.query_start).astype(np.int64)
    num_keys = batch.seq_lens.astype(np.int64)
    rows = np.arange(batch.num_rows)
    first = np.zeros(batch.num_rows, np.int64)
    if key.type is AttentionType.DECODER and key.window is not None and not key.paged:
        # The blocks before the window may be gone.
        first = np.minimum((num_keys - num_queries + 1 - key.window).clip(0), num_keys)
    elif (
        key.type is AttentionType.ENCODER
        and key.window is not None
        and (num_queries > num_keys).any()
    ):
        return _windowed(num_queries, num_keys, key.window)
    return Sequences(rows, num_queries, first, num_keys - first)


def _windowed(num_queries: np.ndarray, num_keys: np.ndarray, window: int) -> Sequences:
    found: list[tuple[int, int, int, int]] = []
    for row, (queries, keys) in enumerate(
        zip(num_queries.tolist(), num_keys.tolist(), strict=True)
    ):
        found.append((row, min(queries, keys), 0, keys))
        for position in range(keys, queries):
            first = min(position - window + 1, keys)
            found.append((row, 1, max(first, 0), keys - max(first, 0)))
    return Sequences(*np.array(found, np.int64).reshape(-1, 4).T)


def _own(batch: BatchView, key: LayerKey) -> bool:
    """Each row sees the tokens that it brings, and no others."""
    return key.type is not AttentionType.CROSS and bool(
        (np.diff(batch.query_start) == batch.seq_lens).all()
    )


def _key_places(batch: BatchView, key: LayerKey, found: Sequences) -> Tensor:
    """[K] int64: the places of all keys, one sequence after the other. They are counted on the
    device: the host sends N numbers, not K."""
    ends = found.num_keys.cumsum()
    total = int(found.num_keys.sum())
    first = found.first_key - ends + found.num_keys
    if key.block_size is None:
        first = first + batch.query_start[found.row]
    given = np.stack([found.num_keys, first, found.row])
    num_keys, first_place, row = torch.from_numpy(given).to(
        batch.seq_lens_device.device, non_blocking=True
    )
    owner = torch.repeat_interleave(num_keys, output_size=total)
    positions: Tensor = torch.arange(total, device=owner.device) + first_place[owner]
    if key.block_size is None:
        return positions
    assert batch.block_table is not None
    blocks = batch.block_table[row[owner], positions // key.block_size].long()
    return key_places(blocks * key.block_size + positions % key.block_size, key.block_size)


def _starts(counts: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], counts.cumsum()]).astype(np.int32)).to(
        device, non_blocking=True
    )
