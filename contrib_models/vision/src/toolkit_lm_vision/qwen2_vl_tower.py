"""The vision towers of Qwen2-VL (Wang et al. 2024) and Qwen2.5-VL (Bai et al. 2025): patches in,
embeddings of squares of them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
import torch
from toolkit_lm.attention import Attention, AttentionType
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    ColumnParallelLinear,
    GatedColumnParallelLinear,
    LayerNorm,
    QKVParallelLinear,
    ReplicatedLinear,
    RMSNorm,
    Rotation,
    RowParallelLinear,
    choose_kernels,
    join,
    torch_dtype,
)
from toolkit_lm.parts import EncoderSequences
from torch import Tensor, nn

from toolkit_lm_vision.qwen2_vl_shape import Grid, PatchShape

_EPS = 1e-6


def norm_of(shape: PatchShape, vllm_config: VllmConfig) -> nn.Module:
    """A norm of hidden states."""
    if shape.rms_eps is not None:
        return RMSNorm(shape.hidden_size, eps=shape.rms_eps, vllm_config=vllm_config)
    return LayerNorm(shape.hidden_size, eps=_EPS, dtype=torch_dtype(vllm_config.model.dtype))


class PatchEmbedding(nn.Module):
    """Patches [N, numbers of a patch] -> [N, H]. A checkpoint's weight is that of a convolution,
    which each patch meets once."""

    def __init__(self, shape: PatchShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.proj = ReplicatedLinear(
            shape.patch_values,
            shape.hidden_size,
            bias=shape.has_patch_bias,
            vllm_config=vllm_config,
            prefix=join(prefix, "proj"),
        )
        self.dtype = torch_dtype(vllm_config.model.dtype)

    def forward(self, patches: Tensor) -> Tensor:
        out: Tensor = self.proj(patches.to(self.dtype))
        return out


class PatchAttention(nn.Module):
    """x [N, H] -> residual + attention(x) [N, H], within the sequences that surround it."""

    def __init__(self, shape: PatchShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        size = shape.hidden_size
        heads = shape.num_heads
        self.head_size = size // heads
        self.qkv = QKVParallelLinear(
            size,
            self.head_size,
            heads,
            heads,
            bias=shape.has_qkv_bias,
            vllm_config=vllm_config,
            prefix=join(prefix, "qkv"),
        )
        self.has_head_norms = shape.has_head_norms
        if shape.has_head_norms:
            eps = shape.rms_eps or _EPS
            self.q_norm = RMSNorm(self.head_size, eps=eps, vllm_config=vllm_config)
            self.k_norm = RMSNorm(self.head_size, eps=eps, vllm_config=vllm_config)
        self.attn = Attention(
            self.qkv.num_heads,
            self.head_size,
            type=AttentionType.ENCODER,
            vllm_config=vllm_config,
            prefix=join(prefix, "attn"),
        )
        self.proj = RowParallelLinear(
            size, size, bias=shape.has_bias, vllm_config=vllm_config, prefix=join(prefix, "proj")
        )

    def forward(self, x: Tensor, residual: Tensor, rotation: Rotation) -> Tensor:
        turned, v = self.qkv(x).split((2 * self.qkv.q_size, self.qkv.kv_size), dim=-1)
        turned = turned.reshape(len(x), -1, self.head_size)
        if self.has_head_norms:
            turned = torch.cat(
                [
                    norm(part)
                    for norm, part in zip(
                        (self.q_norm, self.k_norm), turned.chunk(2, dim=1), strict=True
                    )
                ],
                dim=1,
            )
        # Angles are in float32, whatever the dtype.
        turned = rotation.rotate(turned.float()).to(x.dtype)
        q, k = turned.flatten(1).chunk(2, dim=-1)
        out: Tensor = self.proj(self.attn(q, k, v), residual)
        return out


class PatchMLP(nn.Module):
    """Feed-forward of Qwen2-VL and Qwen3-VL: x [N, H] -> residual + feed-forward(x) [N, H]."""

    names: ClassVar[tuple[str, str]] = ("fc1", "fc2")
    """Names of the two layers in checkpoints."""

    def __init__(self, shape: PatchShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        size = shape.hidden_size
        inner = shape.inner_size
        first, last = self.names
        up = ColumnParallelLinear(
            size,
            inner,
            bias=True,
            activation=shape.activation,
            vllm_config=vllm_config,
            prefix=join(prefix, first),
        )
        down = RowParallelLinear(
            inner, size, bias=True, vllm_config=vllm_config, prefix=join(prefix, last)
        )
        self.add_module(first, up)
        self.add_module(last, down)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        first, last = (self.get_submodule(name) for name in self.names)
        out: Tensor = last(first(x), residual)
        return out


class GatedPatchMLP(nn.Module):
    """Feed-forward of Qwen2.5-VL and GLM-V: x [N, H] -> residual + gated feed-forward(x) [N, H]."""

    def __init__(self, shape: PatchShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        size = shape.hidden_size
        inner = shape.inner_size
        self.gate_up_proj = GatedColumnParallelLinear(
            size,
            inner,
            activation=shape.activation,
            bias=shape.has_bias,
            vllm_config=vllm_config,
            prefix=join(prefix, "gate_up_proj"),
        )
        self.down_proj = RowParallelLinear(
            inner,
            size,
            bias=shape.has_bias,
            vllm_config=vllm_config,
            prefix=join(prefix, "down_proj"),
        )

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gate_up_proj(x), residual)
        return out


class PatchBlock(nn.Module):
    """One layer: x [N, H] -> [N, H]."""

    feed_forward: ClassVar[Callable[..., nn.Module] | None] = None
    """Class of the feed-forward; None: by the shape."""

    def __init__(self, shape: PatchShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.norm1 = norm_of(shape, vllm_config)
        self.norm2 = norm_of(shape, vllm_config)
        self.attn = PatchAttention(shape, vllm_config=vllm_config, prefix=join(prefix, "attn"))
        self.mlp = (self.feed_forward or (PatchMLP if shape.rms_eps is None else GatedPatchMLP))(
            shape, vllm_config=vllm_config, prefix=join(prefix, "mlp")
        )

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        x = self.attn(self.norm1(x), x, rotation)
        out: Tensor = self.mlp(self.norm2(x), x)
        return out


class PatchMerger(nn.Module):
    """States of patches, squares of them in a row [N, H] -> embeddings of the squares [N / merge²,
    size]."""

    def __init__(self, shape: PatchShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.inner_size = shape.hidden_size * shape.merge**2
        self.ln_q = norm_of(shape, vllm_config)
        first = ColumnParallelLinear(
            self.inner_size,
            self.inner_size,
            bias=True,
            activation="gelu",
            vllm_config=vllm_config,
            prefix=join(prefix, "mlp.0"),
        )
        last = RowParallelLinear(
            self.inner_size,
            shape.out_size,
            bias=True,
            vllm_config=vllm_config,
            prefix=join(prefix, "mlp.2"),
        )
        # Checkpoints count the activation as 1.
        self.mlp = nn.Sequential(first, nn.Identity(), last)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.ln_q(x).view(-1, self.inner_size))
        return out


class PatchTower(nn.Module):
    """Patches of items, one item after the other [N, numbers of a patch] -> embeddings of their
    tokens [N / merge², size].

    A frame's patches see each other; in Qwen2.5-VL most layers see windows of a frame. Patches come
    in squares that are merged.
    """

    block: ClassVar[Callable[..., nn.Module]] = PatchBlock
    merger_class: ClassVar[Callable[..., nn.Module]] = PatchMerger

    def __init__(self, shape: PatchShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.shape = shape
        self.kernels = choose_kernels()
        self._full_layers = shape.full_layers if shape.window else range(shape.num_layers)
        self.patch_embed = PatchEmbedding(
            shape, vllm_config=vllm_config, prefix=join(prefix, "patch_embed")
        )
        self.blocks = nn.ModuleList(
            self.block(shape, vllm_config=vllm_config, prefix=join(prefix, f"blocks.{i}"))
            for i in range(shape.num_layers)
        )
        self.merger = self.merger_class(
            shape, vllm_config=vllm_config, prefix=join(prefix, "merger")
        )

    def forward(
        self, patches: Tensor, grids: Sequence[Grid], sequences: EncoderSequences
    ) -> Tensor:
        places = np.concatenate([places_of(grid, self.shape.merge) for grid in grids])
        frames = [grid.h * grid.w for grid in grids for _ in range(grid.t)]
        order, windows = _windows(grids, self.shape) if self.shape.window else (None, [])
        if order is not None:
            patches, places = (
                self._squares(patches)[torch.from_numpy(order)].flatten(0, 1),
                self._squares(places)[order].reshape(-1, 2),
            )
        rotation = self.rotation(torch.from_numpy(places).to(patches.device))
        x = self.patch_embed(patches)
        for lengths, run in groupby(
            enumerate(self.blocks),
            lambda numbered: frames if numbered[0] in self._full_layers else windows,
        ):
            with sequences(lengths):
                for _, block in run:
                    x = block(x, rotation)
        merged: Tensor = self.merger(x)
        return merged if order is None else merged[torch.from_numpy(np.argsort(order))]

    def _squares(self, rows: Any) -> Any:
        """[N, ...] -> [N / merge², merge², ...]."""
        return rows.reshape(-1, self.shape.merge**2, rows.shape[-1])

    def rotation(self, places: Tensor) -> Rotation:
        """Half of a head's dimensions are turned by the row of a patch [N, 2], half by its
        column."""
        size = self.shape.hidden_size // self.shape.num_heads // 2
        frequencies = 1.0 / (
            self.shape.theta
            ** (torch.arange(0, size, 2, dtype=torch.float32, device=places.device) / size)
        )
        angles = (places[..., None].float() * frequencies).flatten(1).unsqueeze(1)
        cos = angles.cos()
        sin = angles.sin()
        return Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), False, self.kernels)


def places_of(grid: Grid, merge: int) -> np.ndarray:
    """[patches, 2] rows and columns of a grid's patches, square after square."""
    frame = np.stack(np.meshgrid(np.arange(grid.h), np.arange(grid.w), indexing="ij"), axis=-1)
    squares = frame.reshape(grid.h // merge, merge, grid.w // merge, merge, 2).swapaxes(1, 2)
    return np.tile(squares.reshape(-1, 2), (grid.t, 1))


def _windows(grids: Sequence[Grid], shape: PatchShape) -> tuple[np.ndarray, list[int]]:
    """The squares of all items, window after window, and how many patches each window has."""
    found: list[np.ndarray] = []
    before = 0
    side = shape.window
    for grid in grids:
        height = grid.h // shape.merge
        width = grid.w // shape.merge
        index = np.arange(grid.t * height * width).reshape(grid.t, height, width) + before
        rows = range(0, height, side)
        columns = range(0, width, side)
        found += [
            index[t, i : i + side, j : j + side].ravel()
            for t in range(grid.t)
            for i in rows
            for j in columns
        ]
        before += index.size
    return np.concatenate(found), [len(window) * shape.merge**2 for window in found]
