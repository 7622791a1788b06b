"""A convolution over the tokens of each sequence, as DeBERTa v2's larger sizes have it."""

from __future__ import annotations

import torch
from toolkit_lm.attention import CacheLayer, current
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.kv import KVCacheSpec
from toolkit_lm.model import HFConfig, LayerNorm, get_activation
from torch import Tensor, nn

from toolkit_lm_encoder.bert import BertShape
from toolkit_lm_encoder.disentangled import EqualRows, WholeSequences


class SequenceConv(CacheLayer):
    """x [T, H], residual [T, H] -> norm of activation(convolution of x) + residual [T, H]."""

    backend = WholeSequences

    def __init__(
        self, shape: BertShape, config: HFConfig, dtype: torch.dtype, *, prefix: str
    ) -> None:
        """Raises UnsupportedError for a kernel that has no token in its middle."""
        super().__init__(prefix)
        size = shape.hidden_size
        kernel = config.require("conv_kernel_size", int)
        if kernel % 2 == 0:
            raise UnsupportedError(
                f"config.json: 'conv_kernel_size' is {kernel}. Supported: odd numbers."
            )
        self.activation = get_activation(config.get("conv_act", str, "tanh"))
        self.conv = nn.Conv1d(
            size,
            size,
            kernel,
            padding=kernel // 2,
            groups=config.get("conv_groups", int, 1),
            dtype=dtype,
        )
        self.LayerNorm = LayerNorm(size, eps=shape.eps, dtype=dtype)

    @property
    def one_way(self) -> bool:
        return False

    def kv_cache_spec(self) -> KVCacheSpec | None:
        return None

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        mixed = self.run(x, out=torch.empty_like(x))
        normed: Tensor = self.LayerNorm(residual + self.activation(mixed))
        return normed

    def compute(self, *inputs: Tensor, out: Tensor) -> None:
        (x,) = inputs
        _, groups = current(self.prefix)
        rows: EqualRows
        for rows in groups:
            states = x[rows.tokens].transpose(1, 2)
            # Tokens that attention does not see are zeros here.
            states[..., rows.num_seen :] = 0
            out[rows.tokens] = self.conv(states).transpose(1, 2)
