"""Positions that are added to the embeddings of tokens."""

from __future__ import annotations

from typing import ClassVar

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError
from torch import Tensor, nn
from torch.nn import functional as F


class Positions(nn.Module):
    """Positions [T] (int64) -> what is added to the embeddings [T, H]: a table's rows."""

    offset: ClassVar[int] = 0
    """Rows of the table that stand before position 0."""
    weight: Tensor

    def __init__(self, max_positions: int, size: int, *, dtype: torch.dtype) -> None:
        super().__init__()

    def substitute(self) -> Tensor | None:
        """The table that counts where the checkpoint has none; None: it must have one."""
        return None

    def forward(self, positions: Tensor) -> Tensor:
        return F.embedding(positions + self.offset if self.offset else positions, self.weight)

    @staticmethod
    def check(max_positions: int, vllm_config: VllmConfig) -> None:
        """Raises ConfigError where sequences of the decoder, or of the encoder, may be longer than
        their table."""
        for name, longest in (
            ("max_model_len", vllm_config.max_model_len),
            ("max_encoder_len", vllm_config.max_encoder_len),
        ):
            if longest > max_positions:
                flag = f"--{name.replace('_', '-')} {max_positions}"
                raise ConfigError(
                    f"{name} is {longest}, but the checkpoint has {max_positions} positions: "
                    f"give {flag} or less."
                )


class LearnedPositions(Positions):
    """A table of the checkpoint."""

    offset = 2

    def __init__(self, max_positions: int, size: int, *, dtype: torch.dtype) -> None:
        super().__init__(max_positions, size, dtype=dtype)
        self.weight = nn.Parameter(torch.empty(max_positions + self.offset, size, dtype=dtype))


class SinusoidalPositions(Positions):
    """Sines, then cosines, of half the dimensions each (Vaswani et al. 2017). A checkpoint may hold
    the table, and that one counts."""

    def __init__(self, max_positions: int, size: int, *, dtype: torch.dtype) -> None:
        super().__init__(max_positions, size, dtype=dtype)
        positions, pairs = (
            torch.arange(*ends, dtype=torch.float64, device="cpu")
            for ends in ((max_positions,), (0, size, 2))
        )
        angles = positions[:, None] / 10000.0 ** (pairs / size)
        table = torch.cat((angles.sin(), angles[:, : size // 2].cos()), dim=1).float()
        self.register_buffer("weight", torch.empty(table.shape, dtype=dtype).copy_(table))

    def substitute(self) -> Tensor:
        return self.weight
