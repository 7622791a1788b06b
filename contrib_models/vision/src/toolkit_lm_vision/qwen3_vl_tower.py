"""The vision tower of Qwen3-VL and Qwen3.5: learned positions, resampled to each picture's grid,
and states of several layers (DeepStack, Meng et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

import numpy as np
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    ColumnParallelLinear,
    LayerNorm,
    RowParallelLinear,
    join,
    torch_dtype,
)
from toolkit_lm.parts import EncoderSequences
from torch import Tensor, nn

from toolkit_lm_vision.qwen2_vl_shape import Grid, PatchShape
from toolkit_lm_vision.qwen2_vl_tower import PatchBlock, PatchMLP, PatchTower, places_of


class LearnedPatchMLP(PatchMLP):
    names = ("linear_fc1", "linear_fc2")


class LearnedPatchBlock(PatchBlock):
    feed_forward = LearnedPatchMLP


class LearnedPatchMerger(nn.Module):
    """States of patches, squares of them in a row [N, H] -> embeddings of the squares [N / merge²,
    size]. `after`: the norm is of squares, not of patches."""

    def __init__(
        self, shape: PatchShape, *, after: bool = False, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        self.inner_size = shape.hidden_size * shape.merge**2
        self.normed_size = self.inner_size if after else shape.hidden_size
        self.norm = LayerNorm(
            self.normed_size, eps=1e-6, dtype=torch_dtype(vllm_config.model.dtype)
        )
        self.linear_fc1 = ColumnParallelLinear(
            self.inner_size,
            self.inner_size,
            bias=True,
            activation="gelu",
            vllm_config=vllm_config,
            prefix=join(prefix, "linear_fc1"),
        )
        self.linear_fc2 = RowParallelLinear(
            self.inner_size,
            shape.out_size,
            bias=True,
            vllm_config=vllm_config,
            prefix=join(prefix, "linear_fc2"),
        )

    def forward(self, x: Tensor) -> Tensor:
        squares = self.norm(x.view(-1, self.normed_size)).view(-1, self.inner_size)
        out: Tensor = self.linear_fc2(self.linear_fc1(squares))
        return out


class LearnedPatchTower(PatchTower):
    """Patches of items [N, numbers of a patch] -> embeddings of their tokens [N / merge², size *
    (1 + deep layers)]: of the last states, then of those of each deep layer."""

    block = LearnedPatchBlock
    merger_class = LearnedPatchMerger

    def __init__(self, shape: PatchShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(shape, vllm_config=vllm_config, prefix=prefix)
        self.pos_embed = nn.Embedding(
            shape.num_positions, shape.hidden_size, dtype=torch_dtype(vllm_config.model.dtype)
        )
        self.deepstack_merger_list = nn.ModuleList(
            LearnedPatchMerger(
                shape,
                after=True,
                vllm_config=vllm_config,
                prefix=join(prefix, f"deepstack_merger_list.{i}"),
            )
            for i in range(len(shape.deep_layers))
        )

    def forward(
        self, patches: Tensor, grids: Sequence[Grid], sequences: EncoderSequences
    ) -> Tensor:
        places = [places_of(grid, self.shape.merge) for grid in grids]
        rotation = self.rotation(torch.from_numpy(np.concatenate(places)).to(patches.device))
        x = self.patch_embed(patches) + self.positions(places, grids)
        found = []
        with sequences([grid.h * grid.w for grid in grids for _ in range(grid.t)]):
            for index, block in enumerate(self.blocks):
                x = block(x, rotation)
                if index in self.shape.deep_layers:
                    merger = self.deepstack_merger_list[self.shape.deep_layers.index(index)]
                    found.append(merger(x))
        return torch.cat([self.merger(x), *found], dim=-1)

    def positions(self, places: Sequence[np.ndarray], grids: Sequence[Grid]) -> Tensor:
        """Embeddings [N, H] of patches at rows and columns [N, 2] of their grids: the learned
        square, stretched linearly so that corners meet."""
        side = isqrt(self.shape.num_positions)
        sizes = np.concatenate([[(grid.h, grid.w)] * grid.num_patches for grid in grids])
        at = np.concatenate(places).astype(np.float32) * np.float32(side - 1)
        at /= np.maximum(sizes - 1, 1).astype(np.float32)
        first = np.floor(at)
        # [N, rows and columns, two neighbours].
        taps = np.minimum(first[..., None] + [0, 1], side - 1).astype(np.int64)
        share = np.stack((1 - (at - first), at - first), axis=-1)
        weight = self.pos_embed.weight
        index = taps[:, 0, :, None] * side + taps[:, 1, None, :]
        factor = share[:, 0, :, None] * share[:, 1, None, :]
        rows = weight[torch.from_numpy(index).flatten(1).to(weight.device)]
        factors = torch.from_numpy(factor).flatten(1).to(weight.device, torch.float32)
        return (rows * factors[..., None]).sum(1).to(weight.dtype)
