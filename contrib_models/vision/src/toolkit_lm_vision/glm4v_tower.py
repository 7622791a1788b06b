"""The vision towers of GLM-4V (GLM-V Team 2025) and GLM-OCR: Qwen2.5-VL's without windows, squares
of patches merged by a convolution and a gated feed-forward."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

import numpy as np
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    GatedColumnParallelLinear,
    LayerNorm,
    ReplicatedLinear,
    RowParallelLinear,
    join,
    torch_dtype,
)
from toolkit_lm.parts import EncoderSequences
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit_lm_vision.qwen2_vl_shape import Grid, PatchShape
from toolkit_lm_vision.qwen2_vl_tower import PatchTower, norm_of, places_of


class GlmPatchMerger(nn.Module):
    """Merged squares [N, size] -> embeddings [N, size]."""

    def __init__(self, shape: PatchShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        size = shape.out_size
        self.proj = ReplicatedLinear(
            size, size, bias=False, vllm_config=vllm_config, prefix=join(prefix, "proj")
        )
        self.post_projection_norm = LayerNorm(
            size, eps=1e-5, dtype=torch_dtype(vllm_config.model.dtype)
        )
        self.gate_up_proj = GatedColumnParallelLinear(
            size,
            shape.merger_size,
            activation=shape.activation,
            bias=False,
            vllm_config=vllm_config,
            prefix=join(prefix, "gate_up_proj"),
        )
        self.down_proj = RowParallelLinear(
            shape.merger_size,
            size,
            bias=False,
            vllm_config=vllm_config,
            prefix=join(prefix, "down_proj"),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.post_projection_norm(self.proj(x)))
        out: Tensor = self.down_proj(self.gate_up_proj(x))
        return out


class GlmEmbeddings(nn.Module):
    """Learned positions of GLM-4V, those of a square of patches."""

    def __init__(self, shape: PatchShape, *, vllm_config: VllmConfig) -> None:
        super().__init__()
        self.side = isqrt(shape.num_positions)
        self.position_embedding = nn.Embedding(
            shape.num_positions, shape.hidden_size, dtype=torch_dtype(vllm_config.model.dtype)
        )

    def forward(self, places: np.ndarray, sizes: np.ndarray) -> Tensor:
        """Positions [N, H] of patches at rows and columns [N, 2] of grids of sizes [N, 2]: the
        square, stretched by bicubic interpolation."""
        weight = self.position_embedding.weight
        at = torch.from_numpy(places).float() + 0.5
        at = (at / torch.from_numpy(sizes).float() * 2 - 1).flip(-1)
        square = weight.float().view(self.side, self.side, -1).permute(2, 0, 1)[None]
        found = F.grid_sample(
            square,
            at[None, :, None].to(weight.device),
            mode="bicubic",
            align_corners=False,
            padding_mode="border",
        )
        return found[0, :, :, 0].T.to(weight.dtype)


class GlmPatchTower(PatchTower):
    """Patches of items [N, numbers of a patch] -> embeddings of their tokens [N / merge², size]. A
    frame's patches see each other."""

    merger_class = GlmPatchMerger

    def __init__(self, shape: PatchShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(shape, vllm_config=vllm_config, prefix=prefix)
        self.has_positions = shape.num_positions > 0
        if self.has_positions:
            self.embeddings = GlmEmbeddings(shape, vllm_config=vllm_config)
            self.post_conv_layernorm = norm_of(shape, vllm_config)
        self.post_layernorm = norm_of(shape, vllm_config)
        self.square = shape.merge**2 * shape.hidden_size
        # A convolution that each square meets once.
        self.downsample = ReplicatedLinear(
            self.square,
            shape.out_size,
            bias=True,
            vllm_config=vllm_config,
            prefix=join(prefix, "downsample"),
        )

    def forward(
        self, patches: Tensor, grids: Sequence[Grid], sequences: EncoderSequences
    ) -> Tensor:
        places = np.concatenate([places_of(grid, self.shape.merge) for grid in grids])
        rotation = self.rotation(torch.from_numpy(places).to(patches.device))
        x = self.patch_embed(patches)
        if self.has_positions:
            sizes = np.concatenate([[(grid.h, grid.w)] * grid.num_patches for grid in grids])
            x = self.post_conv_layernorm(x) + self.embeddings(places, sizes)
        with sequences([grid.h * grid.w for grid in grids for _ in range(grid.t)]):
            for block in self.blocks:
                x = block(x, rotation)
        squares = self.post_layernorm(x).view(-1, self.square)
        merged: Tensor = self.merger(self.downsample(squares))
        return merged
