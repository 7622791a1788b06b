"""The vision tower of Pixtral (Agrawal et al. 2024): pictures of any size, whose patches are turned
by their row and column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from toolkit_lm.attention import Attention, AttentionType
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    GatedColumnParallelLinear,
    HFConfig,
    QKVParallelLinear,
    RMSNorm,
    Rotation,
    RowParallelLinear,
    choose_kernels,
    join,
    torch_dtype,
)
from toolkit_lm.parts import EncoderSequences
from torch import Tensor, nn

from toolkit_lm_vision.shape import VisionShape

_EPS = 1e-5


class PixtralAttention(nn.Module):
    """x [N, H] -> residual + attention(x) [N, H]: all patches of a picture see each other."""

    def __init__(self, shape: VisionShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        size = shape.hidden_size
        self.head_size = size // shape.num_heads
        self.qkv_proj = QKVParallelLinear(
            size,
            self.head_size,
            shape.num_heads,
            shape.num_heads,
            bias=False,
            vllm_config=vllm_config,
            prefix=join(prefix, "qkv_proj"),
        )
        self.attn = Attention(
            self.qkv_proj.num_heads,
            self.head_size,
            type=AttentionType.ENCODER,
            vllm_config=vllm_config,
            prefix=join(prefix, "attn"),
        )
        self.o_proj = RowParallelLinear(
            size, size, bias=False, vllm_config=vllm_config, prefix=join(prefix, "o_proj")
        )

    def forward(self, x: Tensor, residual: Tensor, rotation: Rotation) -> Tensor:
        qkv = self.qkv_proj
        turned, v = qkv(x).split((2 * qkv.q_size, qkv.kv_size), dim=-1)
        # Angles are in float32, whatever the dtype.
        turned = rotation.rotate(turned.float().view(len(x), -1, self.head_size)).to(x.dtype)
        q, k = turned.flatten(1).chunk(2, dim=-1)
        out: Tensor = self.o_proj(self.attn(q, k, v), residual)
        return out


class PixtralMLP(nn.Module):
    """x [N, H] -> residual + gated feed-forward(x) [N, H]."""

    def __init__(self, shape: VisionShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.gate_up_proj = GatedColumnParallelLinear(
            shape.hidden_size,
            shape.inner_size,
            activation=shape.activation,
            bias=False,
            vllm_config=vllm_config,
            prefix=join(prefix, "gate_up_proj"),
        )
        self.down_proj = RowParallelLinear(
            shape.inner_size,
            shape.hidden_size,
            bias=False,
            vllm_config=vllm_config,
            prefix=join(prefix, "down_proj"),
        )

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gate_up_proj(x), residual)
        return out


class PixtralLayer(nn.Module):
    """x [N, H] -> [N, H]."""

    def __init__(self, shape: VisionShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        size = shape.hidden_size
        self.attention_norm = RMSNorm(size, eps=_EPS, vllm_config=vllm_config)
        self.ffn_norm = RMSNorm(size, eps=_EPS, vllm_config=vllm_config)
        self.attention = PixtralAttention(
            shape, vllm_config=vllm_config, prefix=join(prefix, "attention")
        )
        self.feed_forward = PixtralMLP(
            shape, vllm_config=vllm_config, prefix=join(prefix, "feed_forward")
        )

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        x = self.attention(self.attention_norm(x), x, rotation)
        out: Tensor = self.feed_forward(self.ffn_norm(x), x)
        return out


class PixtralLayers(nn.Module):
    """The first layers, as many as are wanted, under their name in checkpoints."""

    def __init__(
        self, shape: VisionShape, num_layers: int, *, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            PixtralLayer(shape, vllm_config=vllm_config, prefix=join(prefix, f"layers.{i}"))
            for i in range(num_layers)
        )


class PixtralTower(nn.Module):
    """Pixels of each picture [1, channels, height, width] -> states of all patches [N, H * wanted],
    after the layers that `wanted` counts, side by side; 0 is before the first. Layers after these
    are not there."""

    def __init__(
        self, shape: VisionShape, wanted: Sequence[int], *, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        self.shape = shape
        self.wanted = tuple(wanted)
        self.kernels = choose_kernels()
        vision: dict[str, Any] = HFConfig(vllm_config.hf_config).require("vision_config", dict)
        rope = HFConfig(HFConfig(vision).get("rope_parameters", dict) or vision)
        self.theta = rope.get("rope_theta", float, 10_000.0)
        self.patch_conv = nn.Conv2d(
            shape.num_channels,
            shape.hidden_size,
            kernel_size=shape.patch_size,
            stride=shape.patch_size,
            bias=False,
            dtype=torch_dtype(vllm_config.model.dtype),
        )
        self.ln_pre = RMSNorm(shape.hidden_size, eps=_EPS, vllm_config=vllm_config)
        self.transformer = PixtralLayers(
            shape, max(wanted), vllm_config=vllm_config, prefix=join(prefix, "transformer")
        )

    def forward(self, pixels: Sequence[Tensor], sequences: EncoderSequences) -> Tensor:
        dtype = self.patch_conv.weight.dtype
        maps = [self.patch_conv(picture.to(dtype))[0] for picture in pixels]
        x: Tensor = self.ln_pre(torch.cat([patches.flatten(1).T for patches in maps]).contiguous())
        rotation = self._rotation([tuple(patches.shape[1:]) for patches in maps], x.device)
        kept = {0: x}
        with sequences([patches[0].numel() for patches in maps]):
            for index, layer in enumerate(self.transformer.layers, 1):
                x = layer(x, rotation)
                if index in self.wanted:
                    kept[index] = x
        return torch.cat([kept[index] for index in self.wanted], dim=-1)

    def _rotation(self, grids: Sequence[tuple[int, ...]], device: torch.device) -> Rotation:
        """The first quarter of a head's dimensions is turned by the row, the next by the column;
        each has every other frequency."""
        size = self.shape.hidden_size // self.shape.num_heads
        places = np.concatenate([np.indices(grid).reshape(2, -1).T for grid in grids])
        exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
        frequencies = 1.0 / (self.theta**exponents)
        turned = torch.from_numpy(places).to(device, torch.float32)
        angles = torch.cat(
            (turned[:, :1] * frequencies[0::2], turned[:, 1:] * frequencies[1::2]), dim=-1
        ).unsqueeze(1)
        cos = angles.cos()
        sin = angles.sin()
        return Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), False, self.kernels)
