"""The vision tower of Florence-2: DaViT (Ding et al. 2022), whose blocks attend over windows of
places and over groups of channels in turn."""

from __future__ import annotations

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    LayerNorm,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    join,
    torch_dtype,
)
from toolkit_lm_paged_attention import fused_attention
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit_lm_vision.florence2_shape import DaViTShape, Stage
from toolkit_lm_vision.towers import VisionMLP


def _windows(x: Tensor, side: int) -> Tensor:
    """Places [N, height, width, C], both sides multiples of `side` -> windows [W, side * side,
    C]."""
    count, height, width, size = x.shape
    tiles = x.view(count, height // side, side, width // side, side, size)
    return tiles.transpose(2, 3).reshape(-1, side * side, size)


def _places(windows: Tensor, count: int, height: int, width: int, side: int) -> Tensor:
    """Windows [W, side * side, C] -> places [N, height, width, C]: the inverse of `_windows`."""
    tiles = windows.view(count, height // side, width // side, side, side, -1)
    return tiles.transpose(2, 3).reshape(count, height, width, -1)


class DaViTAttention(nn.Module):
    """Base of both kinds of attention: the projections of a stage's channels, in `heads` parts."""

    def __init__(
        self, shape: DaViTShape, stage: Stage, heads: int, *, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        size = stage.channels
        self.window = shape.window
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
        self.proj = RowParallelLinear(
            size, size, bias=True, vllm_config=vllm_config, prefix=join(prefix, "proj")
        )


class WindowAttention(DaViTAttention):
    """x [N, height, width, C], residual [N * height * width, C] -> residual + attention(x), within
    squares of `window` places. Zeros fill the last ones, and are seen."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        side = self.window
        count, height, width, _ = x.shape
        padded = F.pad(x, (0, 0, 0, -width % side, 0, -height % side))
        rows, columns = padded.shape[1:3]
        windows = _windows(padded, side)
        q, k, v = (
            part.view(len(windows), side * side, -1, self.head_size).transpose(1, 2)
            for part in self.qkv(windows.flatten(0, 1)).chunk(3, dim=-1)
        )
        seen = fused_attention(q, k, v, scale=self.head_size**-0.5).transpose(1, 2).flatten(2)
        whole = _places(seen, count, rows, columns, side)[:, :height, :width]
        out: Tensor = self.proj(whole.reshape(count * height * width, -1), residual)
        return out


class ChannelAttention(DaViTAttention):
    """x [N, places, C], residual [N * places, C] -> residual + attention(x), of channels to those
    of their group: all places of a channel are its vector."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        count, num_places, _ = x.shape
        q, k, v = (
            part.view(count, num_places, -1, self.head_size).permute(0, 2, 3, 1)
            for part in self.qkv(x.flatten(0, 1)).chunk(3, dim=-1)
        )
        scores = (q * num_places**-0.5) @ k.transpose(2, 3)
        seen = scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype) @ v
        out: Tensor = self.proj(seen.permute(0, 3, 1, 2).reshape(count * num_places, -1), residual)
        return out


class DaViTBlock(nn.Module):
    """x [N, C, height, width] -> the same: attention and feed-forward, each after a convolution of
    every channel alone."""

    def __init__(
        self, shape: DaViTShape, stage: Stage, *, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        size = stage.channels
        dtype = torch_dtype(vllm_config.model.dtype)
        self.conv1 = nn.Conv2d(size, size, 3, padding=1, groups=size, dtype=dtype)
        self.norm1 = LayerNorm(size, dtype=dtype)
        self.conv2 = nn.Conv2d(size, size, 3, padding=1, groups=size, dtype=dtype)
        self.norm2 = LayerNorm(size, dtype=dtype)
        self.ffn = VisionMLP(
            size,
            int(size * shape.mlp_ratio),
            shape.activation,
            vllm_config=vllm_config,
            prefix=join(prefix, "ffn"),
        )

    def attend(self, x: Tensor, residual: Tensor) -> Tensor:
        """x [N, height, width, C], residual [T, C] -> residual + attention(x) [T, C]."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        places = len(x), *x.shape[2:]
        x = _rows(self.conv1(x) + x)
        x = self.attend(self.norm1(x).view(*places, -1), x)
        x = _picture(x, *places)
        x = _rows(self.conv2(x) + x)
        return _picture(self.ffn(self.norm2(x), x), *places)


class SpatialBlock(DaViTBlock):
    """A block whose attention is over windows of places."""

    def __init__(
        self, shape: DaViTShape, stage: Stage, *, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__(shape, stage, vllm_config=vllm_config, prefix=prefix)
        self.window_attn = WindowAttention(
            shape,
            stage,
            stage.num_heads,
            vllm_config=vllm_config,
            prefix=join(prefix, "window_attn"),
        )

    def attend(self, x: Tensor, residual: Tensor) -> Tensor:
        out: Tensor = self.window_attn(x, residual)
        return out


class ChannelBlock(DaViTBlock):
    """A block whose attention is over groups of channels."""

    def __init__(
        self, shape: DaViTShape, stage: Stage, *, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__(shape, stage, vllm_config=vllm_config, prefix=prefix)
        self.channel_attn = ChannelAttention(
            shape,
            stage,
            stage.num_groups,
            vllm_config=vllm_config,
            prefix=join(prefix, "channel_attn"),
        )

    def attend(self, x: Tensor, residual: Tensor) -> Tensor:
        out: Tensor = self.channel_attn(x.flatten(1, 2), residual)
        return out


def _rows(x: Tensor) -> Tensor:
    """[N, C, height, width] -> [N * height * width, C]."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def _picture(x: Tensor, count: int, height: int, width: int) -> Tensor:
    """[N * height * width, C] -> [N, C, height, width]."""
    return x.view(count, height, width, -1).permute(0, 3, 1, 2)


class DaViTPair(nn.Module):
    """x [N, C, height, width] -> the same: a block over windows, and one over channels."""

    def __init__(
        self, shape: DaViTShape, stage: Stage, *, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        self.spatial_block = SpatialBlock(
            shape, stage, vllm_config=vllm_config, prefix=join(prefix, "spatial_block")
        )
        self.channel_block = ChannelBlock(
            shape, stage, vllm_config=vllm_config, prefix=join(prefix, "channel_block")
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.channel_block(self.spatial_block(x))
        return out


class DaViTEmbedding(nn.Module):
    """x [N, channels, height, width] -> [N, C, smaller height, smaller width]: a convolution, and a
    norm before or after it."""

    def __init__(self, stage: Stage, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.norms_first = stage.norms_first
        self.conv = nn.Conv2d(
            stage.in_channels,
            stage.channels,
            stage.kernel,
            stride=stage.stride,
            padding=stage.padding,
            dtype=dtype,
        )
        self.norm = LayerNorm(
            stage.in_channels if stage.norms_first else stage.channels, dtype=dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(self._normed(x)) if self.norms_first else self._normed(self.conv(x))
        return out

    def _normed(self, x: Tensor) -> Tensor:
        return _picture(self.norm(_rows(x)), len(x), *x.shape[2:])


class DaViT(nn.Module):
    """Pixels [N, channels, height, width] -> states [N, C, rows, columns]."""

    def __init__(self, shape: DaViTShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        dtype = torch_dtype(vllm_config.model.dtype)
        self.convs = nn.ModuleList(DaViTEmbedding(stage, dtype=dtype) for stage in shape.stages)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(
                    DaViTPair(
                        shape,
                        stage,
                        vllm_config=vllm_config,
                        prefix=join(prefix, f"blocks.{i}.{j}"),
                    )
                    for j in range(stage.depth)
                )
            )
            for i, stage in enumerate(shape.stages)
        )

    def forward(self, pixels: Tensor) -> Tensor:
        x = pixels
        for conv, blocks in zip(self.convs, self.blocks, strict=True):
            x = blocks(conv(x))
        return x


class PlaceEmbedding(nn.Module):
    """Rows and columns -> learned positions [rows, columns, C]: of the column, then of the row."""

    def __init__(self, shape: DaViTShape, *, dtype: torch.dtype) -> None:
        super().__init__()
        size = shape.last_size
        self.row_embeddings = nn.Embedding(shape.max_side, size // 2, dtype=dtype)
        self.column_embeddings = nn.Embedding(shape.max_side, size - size // 2, dtype=dtype)

    def forward(self, rows: int, columns: int) -> Tensor:
        of_columns = self.column_embeddings.weight[:columns].expand(rows, -1, -1)
        of_rows = self.row_embeddings.weight[:rows, None].expand(-1, columns, -1)
        return torch.cat((of_columns, of_rows), dim=-1)


class TimeEmbedding(nn.Module):
    """The position [C] of a picture, which is the first frame."""

    pos_idx_to_embed: Tensor

    def __init__(self, shape: DaViTShape, *, dtype: torch.dtype) -> None:
        super().__init__()
        size = (shape.max_frames, shape.last_size)
        self.pos_idx_to_embed = nn.Parameter(torch.empty(size, dtype=dtype))

    def forward(self) -> Tensor:
        return self.pos_idx_to_embed[0]


class Florence2Projector(nn.Module):
    """States [N, C, rows, columns] -> embeddings [N, 1 + rows * columns, H]: of their mean, and of
    each."""

    def __init__(self, shape: DaViTShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        dtype = torch_dtype(vllm_config.model.dtype)
        self.image_projection = ReplicatedLinear(
            shape.last_size,
            shape.projected_size,
            bias=False,
            vllm_config=vllm_config,
            prefix=join(prefix, "image_projection"),
        )
        self.image_proj_norm = LayerNorm(shape.projected_size, dtype=dtype)
        self.image_position_embed = PlaceEmbedding(shape, dtype=dtype)
        self.visual_temporal_embed = TimeEmbedding(shape, dtype=dtype)

    def forward(self, states: Tensor) -> Tensor:
        count, _, rows, columns = states.shape
        x = states.permute(0, 2, 3, 1) + self.image_position_embed(rows, columns)
        x = x.flatten(1, 2) + self.visual_temporal_embed()
        x = torch.cat((x.mean(dim=1, keepdim=True), x), dim=1)
        projected = self.image_projection(x.flatten(0, 1))
        out: Tensor = self.image_proj_norm(projected).view(count, 1 + rows * columns, -1)
        return out
