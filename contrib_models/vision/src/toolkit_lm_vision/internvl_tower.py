"""InternVL's vision tower (Chen et al. 2023): a transformer of patches whose layers scale what they
add."""

from __future__ import annotations

import torch
from toolkit_lm.attention import Attention, AttentionType
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    ColumnParallelLinear,
    HFConfig,
    LayerNorm,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    Shard,
    ShardLoader,
    join,
    new_parameter,
    torch_dtype,
)
from toolkit_lm.parts import EncoderSequences
from toolkit_lm_decoder.sharded_norm import norm_of_shard
from torch import Tensor, nn

from toolkit_lm_vision.shape import VisionShape


def _vision(vllm_config: VllmConfig) -> HFConfig:
    return HFConfig(HFConfig(vllm_config.hf_config).require("vision_config", dict))


class InternVLAttention(nn.Module):
    """x [T, H] -> attention(x) [T, H]: all states of a tile see each other."""

    def __init__(self, shape: VisionShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = _vision(vllm_config)
        size = shape.hidden_size
        heads = shape.num_heads
        self.qkv_proj = QKVParallelLinear(
            size,
            size // heads,
            heads,
            heads,
            bias=config.get("attention_bias", bool, False),
            vllm_config=vllm_config,
            prefix=join(prefix, "qkv_proj"),
        )
        self.has_norms = config.get("use_qk_norm", bool, False)
        if self.has_norms:
            q, k, _ = self.qkv_proj.spec.outputs
            self.q_norm = norm_of_shard(q, eps=1e-6, vllm_config=vllm_config)
            self.k_norm = norm_of_shard(k, eps=1e-6, vllm_config=vllm_config)
        self.attn = Attention(
            self.qkv_proj.num_heads,
            size // heads,
            type=AttentionType.ENCODER,
            vllm_config=vllm_config,
            prefix=join(prefix, "attn"),
        )
        self.projection_layer = RowParallelLinear(
            size, size, bias=True, vllm_config=vllm_config, prefix=join(prefix, "projection_layer")
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x).split(self.qkv_proj.q_size, dim=-1)
        if self.has_norms:
            q, k = self.q_norm(q.contiguous()), self.k_norm(k.contiguous())
        out: Tensor = self.projection_layer(self.attn(q, k, v))
        return out


class InternVLMLP(nn.Module):
    """x [T, H] -> feed-forward(x) [T, H]."""

    def __init__(self, shape: VisionShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.fc1 = ColumnParallelLinear(
            shape.hidden_size,
            shape.inner_size,
            bias=True,
            activation=shape.activation,
            vllm_config=vllm_config,
            prefix=join(prefix, "fc1"),
        )
        self.fc2 = RowParallelLinear(
            shape.inner_size,
            shape.hidden_size,
            bias=True,
            vllm_config=vllm_config,
            prefix=join(prefix, "fc2"),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.fc1(x))
        return out


class InternVLLayer(nn.Module):
    """x [T, H] -> [T, H]."""

    def __init__(self, shape: VisionShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        size = shape.hidden_size
        dtype = torch_dtype(vllm_config.model.dtype)

        def norm() -> nn.Module:
            if _vision(vllm_config).get("norm_type", str, "layer_norm") == "rms_norm":
                return RMSNorm(size, eps=shape.eps, vllm_config=vllm_config)
            return LayerNorm(size, eps=shape.eps, dtype=dtype)

        self.layernorm_before = norm()
        self.layernorm_after = norm()
        self.attention = InternVLAttention(
            shape, vllm_config=vllm_config, prefix=join(prefix, "attention")
        )
        self.mlp = InternVLMLP(shape, vllm_config=vllm_config, prefix=join(prefix, "mlp"))
        self.lambda_1 = new_parameter((size,), dtype, ShardLoader((Shard.whole(size),)))
        self.lambda_2 = new_parameter((size,), dtype, ShardLoader((Shard.whole(size),)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.lambda_1 * self.attention(self.layernorm_before(x))
        out: Tensor = x + self.lambda_2 * self.mlp(self.layernorm_after(x))
        return out


class InternVLPatches(nn.Module):
    """The convolution over patches, under its name in checkpoints."""

    def __init__(self, shape: VisionShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.projection = nn.Conv2d(
            shape.num_channels,
            shape.hidden_size,
            kernel_size=shape.patch_size,
            stride=shape.patch_size,
            dtype=dtype,
        )


class InternVLEmbeddings(nn.Module):
    """Pixels [N, channels, S, S] -> [N, states, H]: of the tile, then of each patch."""

    def __init__(self, shape: VisionShape, *, vllm_config: VllmConfig) -> None:
        super().__init__()
        size = shape.hidden_size
        dtype = torch_dtype(vllm_config.model.dtype)
        whole = ShardLoader((Shard.whole(1),))
        self.cls_token = new_parameter((1, 1, size), dtype, whole)
        self.patch_embeddings = InternVLPatches(shape, dtype)
        self.has_positions = _vision(vllm_config).get(
            "use_absolute_position_embeddings", bool, True
        )
        if self.has_positions:
            self.position_embeddings = new_parameter((1, shape.num_states, size), dtype, whole)

    def forward(self, pixels: Tensor) -> Tensor:
        projection = self.patch_embeddings.projection
        x = projection(pixels.to(projection.weight.dtype)).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        return x + self.position_embeddings if self.has_positions else x


class InternVLEncoder(nn.Module):
    """The layers, under their name in checkpoints."""

    def __init__(self, shape: VisionShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.layer = nn.ModuleList(
            InternVLLayer(shape, vllm_config=vllm_config, prefix=join(prefix, f"layer.{i}"))
            for i in range(shape.num_layers)
        )


class InternVLTower(nn.Module):
    """Pixels of tiles [N, channels, S, S] -> states of their patches [N, patches, H]."""

    def __init__(self, shape: VisionShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.shape = shape
        self.embeddings = InternVLEmbeddings(shape, vllm_config=vllm_config)
        self.encoder = InternVLEncoder(
            shape, vllm_config=vllm_config, prefix=join(prefix, "encoder")
        )
        if not _vision(vllm_config).get("use_mean_pooling", bool, True):
            self.layernorm = LayerNorm(
                shape.hidden_size, eps=shape.eps, dtype=torch_dtype(vllm_config.model.dtype)
            )

    def forward(self, pixels: Tensor, sequences: EncoderSequences) -> Tensor:
        x: Tensor = self.embeddings(pixels)
        size, x = x.shape, x.flatten(0, 1)
        with sequences([self.shape.num_states] * len(pixels)):
            for layer in self.encoder.layer:
                x = layer(x)
        if hasattr(self, "layernorm"):
            x = self.layernorm(x)
        return x.view(size)[:, 1:]
