"""Places of keys in a cache whose pages hold keys before values.

The cache is seen as vectors [num_blocks * 2 * block_size, num_kv_heads, head_size]. A place is an
index of them. A value lies block_size after its key.
"""

from __future__ import annotations

import numpy as np
import torch
from toolkit_lm.attention import AttentionCall, BatchView
from torch import Tensor


def key_places(slots: Tensor, block_size: int) -> Tensor:
    """Places of the keys of `slots`, as int64 where `slots` are."""
    return slots + slots.div(block_size, rounding_mode="floor").mul_(block_size)


def halves(kv_cache: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The cache as vectors [N, num_kv_heads, head_size], from the first key on and from the first
    value on: one place finds a key and its value."""
    vectors = kv_cache[0].view(-1, *kv_cache[0].shape[3:])
    return vectors, vectors[kv_cache[0].shape[2] :]


def keys_and_values(call: AttentionCall, places: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys and values [K, num_kv_heads, head_size] at `places` [K] in the cache, or among the
    step's own tokens where nothing is cached. None: the step's own, in order."""
    if places is None or call.kv_cache is None:
        assert call.k is not None and call.v is not None
        return (call.k, call.v) if places is None else (call.k[places], call.v[places])
    keys, values = halves(call.kv_cache)
    return keys.index_select(0, places), values.index_select(0, places)


def places_of_keys(
    batch: BatchView,
    rows: np.ndarray,
    first: np.ndarray,
    counts: np.ndarray,
    block_size: int | None,
) -> Tensor:
    """Places of the keys of N sequences, one sequence after the other: [counts.sum()] int64, on the
    device of the step.

    Sequence n has counts[n] keys of the step's row rows[n], from position first[n] on. `block_size`
    is the cache's. None: nothing is cached, and the places are indices of the step's tokens.
    """
    begin = first - counts.cumsum() + counts
    if block_size is None:
        begin = begin + batch.query_start[rows]
    # The keys are counted on the device: the host sends three numbers for each sequence.
    sent = torch.from_numpy(np.stack([counts, begin, rows]))
    num_keys, begins, owners = sent.to(batch.seq_lens_device.device, non_blocking=True)
    total = int(counts.sum())
    sequence = torch.repeat_interleave(num_keys, output_size=total)
    positions: Tensor = torch.arange(total, device=sequence.device) + begins[sequence]
    if block_size is None:
        return positions
    assert batch.block_table is not None
    blocks = batch.block_table[owners[sequence], positions // block_size].long()
    return key_places(blocks * block_size + positions % block_size, block_size)
