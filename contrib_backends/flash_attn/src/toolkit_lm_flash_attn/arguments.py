"""Arguments of FlashAttention for a step: starts of each sequence's queries and keys, causality and
windows, and pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from toolkit_lm.attention import AttentionType, BatchView
from toolkit_lm_paged_attention import places_of_keys
from torch import Tensor

_ALL = -1
"""Window size that FlashAttention takes for no window."""


class LayerKey(NamedTuple):
    """The properties of a layer, its cache and its kernel that the arguments depend on."""

    type: AttentionType | str
    window: int | None
    block_size: int | None
    """Block size of the KV cache. None: nothing is cached."""
    paged: bool
    """Whether the kernel reads the cache through the block table. Otherwise the keys are gathered
    for it."""


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
    """[N + 1] int32, the kernels' cu_seqlens_k: sequence n has the keys key_start[n] : key_start[n
    + 1]. With pages, only the numbers of keys count."""
    max_queries: int
    max_keys: int
    causal: bool
    window: tuple[int, int]
    """Numbers of keys before and after its own position that a query sees. -1: all."""
    keys: Tensor | None
    """[K] int64: indices of the keys, among the step's tokens or in the cache seen as vectors
    [num_blocks * 2 * block_size, ...].

    None: the step's tokens in order, or the pages of `block_table`.
    """
    block_table: Tensor | None
    """[N, most blocks] int32: block table of the keys. None: the keys are not paged."""


class Sequences(NamedTuple):
    """Queries and keys of sequences. Each array is [N] int64."""

    row: np.ndarray
    num_queries: np.ndarray
    first_key: np.ndarray
    """[N] int64: position of each sequence's first key in its row."""
    num_keys: np.ndarray


def make_arguments(batch: BatchView, key: LayerKey) -> Arguments:
    """Decoder: square and causal, or with keys of earlier steps. Encoder: square. Cross: as many
    keys as the encoder has tokens."""
    found = sequences(batch, key)
    device = batch.seq_lens_device.device
    causal = key.type is AttentionType.DECODER
    reach = _ALL if key.window is None else key.window - 1
    keys = None
    if not key.paged and not _own(batch, key):
        keys = places_of_keys(batch, found.row, found.first_key, found.num_keys, key.block_size)
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
    """The sequences of a step, usually one per row.

    An encoder with a window differs: each query past the row's keys is a sequence of its own, with
    the keys that it sees.
    """
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
    """Whether each row sees exactly the tokens that it brings."""
    return key.type is not AttentionType.CROSS and bool(
        (np.diff(batch.query_start) == batch.seq_lens).all()
    )


def _starts(counts: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], counts.cumsum()]).astype(np.int32)).to(
        device, non_blocking=True
    )
