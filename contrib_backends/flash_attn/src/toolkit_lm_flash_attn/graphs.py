"""Decode steps in CUDA graphs: what the kernel is told of them lies where it lay in other steps of
as many rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from toolkit_lm.attention import BatchView
from torch import Tensor

from toolkit_lm_flash_attn.arguments import Arguments, LayerKey, key_places


@dataclass(frozen=True, slots=True)
class FixedMetadata:
    """One step of R rows of one query each, whose keys are read from pages. A row of padding has no
    keys."""

    batch: BatchView
    stored: Tensor
    """[R] int64: the token whose key and value are stored. One of padding stores again what another
    one stores."""
    places: Tensor
    """[R] int64: where, in the cache seen as vectors [num_blocks * 2 * block_size, ...]."""
    key_start: Tensor
    """[R + 1] int32."""

    def slots(self, block_size: int) -> Tensor:
        """As of other steps; they are for the block size that the cache has."""
        return self.places

    def arguments(self, key: LayerKey) -> Arguments:
        """The bounds of keys are those of all steps."""
        assert key.paged
        return Arguments(
            query_start=self.batch.query_start_device,
            key_start=self.key_start,
            max_queries=1,
            max_keys=self.batch.max_seq_len,
            causal=True,
            window=(-1 if key.window is None else key.window - 1, 0),
            keys=None,
            block_table=self.batch.block_table,
        )


class FixedSteps:
    """Makes the metadata of steps in CUDA graphs, in tensors that it keeps by the number of rows.
    The host waits for nothing."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._kept: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def build(self, batch: BatchView) -> FixedMetadata:
        """`batch` has one query for each row, and one row at least is no padding."""
        assert batch.max_query_len == 1 and batch.slot_mapping is not None
        rows = batch.num_rows
        if rows not in self._kept:
            stored, places = torch.zeros(2, rows, dtype=torch.int64, device=self._device)
            self._kept[rows] = (
                stored,
                places,
                torch.zeros(rows + 1, dtype=torch.int32, device=self._device),
            )
        stored, places, key_start = self._kept[rows]
        is_stored = batch.slot_mapping >= 0
        tokens = torch.arange(rows, device=self._device)
        torch.where(is_stored, tokens, is_stored.int().argmax(), out=stored)
        places.copy_(key_places(batch.slot_mapping[stored], self._block_size))
        torch.cumsum(batch.seq_lens_device, 0, dtype=torch.int32, out=key_start[1:])
        return FixedMetadata(batch, stored, places, key_start)
