"""Plan of one step for a layer: pieces of rows that are computed together, the indices of their
keys, and masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from toolkit_lm.attention import AttentionType, BatchView, LayerParams
from toolkit_lm_paged_attention import key_places
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(piece, head, query, key), all indices -> whether the query sees the key."""


class LayerKey(NamedTuple):
    """The properties of a layer, and of its cache, that a plan depends on."""

    type: AttentionType | str
    window: int | None
    num_heads: int
    block_size: int | None
    """Block size of the KV cache. None: nothing is cached."""
    most_scores: int
    """Most scores of a group, over all its heads."""

    @classmethod
    def of(
        cls, layer: LayerParams, kv_cache: tuple[Tensor, ...] | None, most_scores: int
    ) -> LayerKey:
        block_size = None if kv_cache is None else kv_cache[0].shape[2]
        return cls(layer.attention_type, layer.window, layer.num_heads, block_size, most_scores)


class QueryChunk(NamedTuple):
    """Some queries of one row, and the keys that any of them can see."""

    row: int
    token: int
    """Index of the first query among the step's tokens."""
    position: int
    """Position of the first query in its row."""
    num_queries: int
    first_key: int
    """Position of the first key in its row."""
    num_keys: int


@dataclass(frozen=True, slots=True)
class Group:
    """N pieces of similar shape, padded to Q queries and K keys. Padding repeats a query or a key
    of the same piece."""

    tokens: Tensor
    """[N, Q] int64: indices of the queries among the step's tokens."""
    real: Tensor
    """[P] int64: indices of the queries without padding, among the N * Q."""
    keys: Tensor
    """[N, K] int64: indices of the keys, among the step's tokens or in the cache seen as vectors
    [num_blocks * 2 * block_size, ...]."""
    q_positions: Tensor
    """[N, Q] int64: positions of the queries in their rows."""
    k_positions: Tensor
    """[N, K] int64: positions of the keys in their rows."""
    longest: int
    """Bound of the distance between a query and a key."""
    mask: MaskMod
    _blocks: list[BlockMask] = field(default_factory=list)

    def number(self, value: float | None, dtype: torch.dtype) -> Tensor | None:
        """See `_number`."""
        return _number(value, len(self.tokens), dtype, self.tokens.device)

    def blocks(self) -> BlockMask:
        """The mask, and which blocks of keys no query of a block sees, so that a kernel leaves them
        out. Made once for all layers."""
        if not self._blocks:
            (count, num_queries) = self.tokens.shape
            num_keys = self.keys.shape[1]
            self._blocks.append(
                create_block_mask(
                    self.mask, count, None, num_queries, num_keys, device=self.tokens.device
                )
            )
        return self._blocks[0]


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """How a layer computes a step."""

    groups: list[Group]
    keyless: list[slice]
    """Tokens that have no key at all: their output is 0."""


def make_plan(batch: BatchView, key: LayerKey) -> LayerPlan:
    pieces: list[QueryChunk] = []
    keyless: list[slice] = []
    for row in range(batch.num_rows):
        start = int(batch.query_start[row])
        stop = int(batch.query_start[row + 1])
        if batch.seq_lens[row] == 0:
            keyless.append(slice(start, stop))
        else:
            pieces += _pieces(key, row, start, stop - start, int(batch.seq_lens[row]))
    return LayerPlan(
        [_group(batch, key, part) for part in _similar(pieces, key.most_scores // key.num_heads)],
        keyless,
    )


def _pieces(
    key: LayerKey, row: int, token: int, num_queries: int, num_keys: int
) -> Iterator[QueryChunk]:
    """A row's queries, as many at a time as their scores may be."""
    decoder = key.type is AttentionType.DECODER
    position = num_keys - num_queries if decoder else 0
    step = max(1, key.most_scores // (key.num_heads * num_keys))
    for first in range(0, num_queries, step):
        count = min(step, num_queries - first)
        begin = 0
        end = num_keys
        if decoder:
            end = position + first + count
            # The blocks before the window may be gone.
            begin = 0 if key.window is None else max(0, position + first + 1 - key.window)
        yield QueryChunk(row, token + first, position + first, count, begin, end - begin)


def _similar(pieces: Sequence[QueryChunk], most: int) -> Iterator[list[QueryChunk]]:
    """Groups of pieces with similar shape.

    A group has at most `most` pairs of a query and a key, padding included. Padding at most doubles
    a group's pairs.
    """
    part: list[QueryChunk] = []
    pairs = longest = 0
    for piece in sorted(pieces, key=lambda piece: (-piece.num_queries, -piece.num_keys)):
        own, longest = piece.num_queries * piece.num_keys, max(longest, piece.num_keys)
        padded = (len(part) + 1) * part[0].num_queries * longest if part else 0
        if padded > min(most, 2 * (pairs + own)):
            yield part
            part = []
            pairs = 0
            longest = piece.num_keys
        part.append(piece)
        pairs += own
    if part:
        yield part


def _group(batch: BatchView, key: LayerKey, pieces: list[QueryChunk]) -> Group:
    device = batch.seq_lens_device.device
    rows, tokens, positions, num_queries, first_keys, num_keys = np.array(pieces, dtype=np.int64).T[
        :, :, None
    ]
    queries = np.arange(num_queries.max())[None]
    keys = np.arange(num_keys.max())[None]
    inner = np.minimum(queries, num_queries - 1)
    seen = first_keys + np.minimum(keys, num_keys - 1)
    real = np.flatnonzero(queries < num_queries)

    def to(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    k_positions = to(seen)
    if key.block_size is None:
        places = k_positions + to(batch.query_start[rows].astype(np.int64))
    else:
        places = _cached_keys(batch, to(rows[:, 0]), k_positions, key.block_size)
    return Group(
        tokens=to(tokens + inner),
        real=to(real),
        keys=places,
        q_positions=to(positions + inner),
        k_positions=k_positions,
        longest=int(max(seen.max(), (positions + inner).max())),
        mask=_mask(
            key,
            to((first_keys - positions)[:, 0]),
            to(num_keys[:, 0]),
            _number(key.window, len(pieces), torch.int64, device),
        ),
    )


def _cached_keys(batch: BatchView, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Indices in the cache of the keys at `positions` [N, K] of rows [N]."""
    assert batch.block_table is not None
    blocks = batch.block_table[rows].gather(1, positions // block_size).long()
    return key_places(blocks * block_size + positions % block_size, block_size)


def _number(
    value: float | None, num_pieces: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """A number that a function of FlexAttention reads, for each piece [N]; None stays None.

    A number of Python becomes a symbol where shapes are dynamic, and kernels for GPUs refuse
    symbols.
    """
    return None if value is None else torch.full((num_pieces,), value, dtype=dtype, device=device)


def _mask(key: LayerKey, ahead: Tensor, num_keys: Tensor, windows: Tensor | None) -> MaskMod:
    """Mask function of a group.

    `ahead` [N]: the first key's position minus the first query's, for each piece. `num_keys` [N]:
    number of each piece's keys without padding. `windows` [N]: the window, for each piece.
    """
    causal = key.type is AttentionType.DECODER

    def sees(piece: Tensor, head: Tensor, query: Tensor, other: Tensor) -> Tensor:
        distance = ahead[piece] + other - query
        seen = other < num_keys[piece]
        if causal:
            seen = seen & (distance <= 0)
        if windows is not None:
            seen = seen & (distance > -windows[piece]) & (distance < windows[piece])
        return seen

    return sees
