"""Decode steps in CUDA graphs: their arguments keep the same addresses for each number of rows."""

from __future__ import annotations

import torch
from toolkit_lm.attention import BatchView
from torch import Tensor

from toolkit_lm_flash_attn.arguments import Arguments, LayerKey


class FixedSteps:
    """Arguments of steps in CUDA graphs: R rows of one query each, whose keys are read from pages.
    A row of padding has no keys. It does not synchronize with the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._key_starts: dict[int, Tensor] = {}
        """[R + 1] int32, the kernels' cu_seqlens_k, by R."""

    def fill(self, batch: BatchView) -> None:
        """Updates the tensors that steps of as many rows share."""
        assert batch.max_query_len == 1, "graphs hold decodes alone"
        rows = batch.num_rows
        if rows not in self._key_starts:
            self._key_starts[rows] = torch.zeros(rows + 1, dtype=torch.int32, device=self._device)
        torch.cumsum(batch.seq_lens_device, 0, dtype=torch.int32, out=self._key_starts[rows][1:])

    def arguments(self, batch: BatchView, key: LayerKey) -> Arguments:
        """Arguments of the kernel. The bounds of lengths hold for all steps of as many rows."""
        assert key.paged
        return Arguments(
            query_start=batch.query_start_device,
            key_start=self._key_starts[batch.num_rows],
            max_queries=1,
            max_keys=batch.max_seq_len,
            causal=True,
            window=(-1 if key.window is None else key.window - 1, 0),
            keys=None,
            block_table=batch.block_table,
        )
