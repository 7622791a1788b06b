"""Vision towers: CLIP's (Radford et al. 2021) and SigLIP's (Zhai et al. 2023). Pictures in, a state
of each patch out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import isqrt
from typing import ClassVar

import torch
from toolkit_lm.attention import Attention, AttentionType
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    ColumnParallelLinear,
    LayerNorm,
    Model,
    QKVParallelLinear,
    RowParallelLinear,
    Shard,
    ShardLoader,
    join,
    new_parameter,
    torch_dtype,
)
from toolkit_lm.parts import EncoderSequences
from torch import Tensor, nn

from toolkit_lm_vision.shape import VisionShape


class VisionAttention(nn.Module):
    """x [T, H] -> residual + attention(x) [T, H]: all patches of a picture see each other."""

    def __init__(self, shape: VisionShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        size = shape.hidden_size
        heads = shape.num_heads
        self.qkv_proj = QKVParallelLinear(
            size,
            size // heads,
            heads,
            heads,
            bias=True,
            vllm_config=vllm_config,
            prefix=join(prefix, "qkv_proj"),
        )
        self.attn = Attention(
            self.qkv_proj.num_heads,
            size // heads,
            type=AttentionType.ENCODER,
            vllm_config=vllm_config,
            prefix=join(prefix, "attn"),
        )
        self.out_proj = RowParallelLinear(
            size, size, bias=True, vllm_config=vllm_config, prefix=join(prefix, "out_proj")
        )

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        out: Tensor = self.out_proj(
            self.attn(*self.qkv_proj(x).split(self.qkv_proj.q_size, dim=-1)), residual
        )
        return out


class VisionMLP(nn.Module):
    """x [T, H] -> residual + feed-forward(x) [T, H]."""

    def __init__(
        self, size: int, inner: int, activation: str, *, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        self.fc1 = ColumnParallelLinear(
            size,
            inner,
            bias=True,
            activation=activation,
            vllm_config=vllm_config,
            prefix=join(prefix, "fc1"),
        )
        self.fc2 = RowParallelLinear(
            inner, size, bias=True, vllm_config=vllm_config, prefix=join(prefix, "fc2")
        )

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.fc1(x), residual)
        return out


class VisionLayer(nn.Module):
    """x [T, H] -> [T, H]."""

    def __init__(self, shape: VisionShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        dtype = torch_dtype(vllm_config.model.dtype)
        self.layer_norm1 = LayerNorm(shape.hidden_size, eps=shape.eps, dtype=dtype)
        self.self_attn = VisionAttention(
            shape, vllm_config=vllm_config, prefix=join(prefix, "self_attn")
        )
        self.layer_norm2 = LayerNorm(shape.hidden_size, eps=shape.eps, dtype=dtype)
        self.mlp = VisionMLP(
            shape.hidden_size,
            shape.inner_size,
            shape.activation,
            vllm_config=vllm_config,
            prefix=join(prefix, "mlp"),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.self_attn(self.layer_norm1(x), x)
        out: Tensor = self.mlp(self.layer_norm2(x), x)
        return out


class VisionEmbeddings(nn.Module):
    """Pixels [N, channels, S, S] -> [N, states, H]: of each patch, with its position; CLIP's have
    one of the picture before them."""

    def __init__(self, shape: VisionShape, *, vllm_config: VllmConfig) -> None:
        super().__init__()
        size = shape.hidden_size
        dtype = torch_dtype(vllm_config.model.dtype)
        patch = shape.patch_size
        self.patch_embedding = nn.Conv2d(
            shape.num_channels,
            size,
            kernel_size=patch,
            stride=patch,
            bias=not shape.is_clip,
            dtype=dtype,
        )
        self.position_embedding = nn.Embedding(shape.num_states, size, dtype=dtype)
        if shape.is_clip:
            self.class_embedding = new_parameter((size,), dtype, ShardLoader((Shard.whole(size),)))

    def forward(self, pixels: Tensor) -> Tensor:
        x: Tensor = (
            self.patch_embedding(pixels.to(self.patch_embedding.weight.dtype))
            .flatten(2)
            .transpose(1, 2)
        )
        if hasattr(self, "class_embedding"):
            x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], dim=1)
        return x + self.positions()

    def positions(self) -> Tensor:
        """[states, H] embeddings of the states' places."""
        return self.position_embedding.weight


class VisionLayers(nn.Module):
    """The first layers of a tower, as many as are wanted."""

    def __init__(
        self, shape: VisionShape, num_layers: int, *, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            VisionLayer(shape, vllm_config=vllm_config, prefix=join(prefix, f"layers.{i}"))
            for i in range(num_layers)
        )


class VisionTower(nn.Module):
    """Pixels [N, channels, S, S] -> states [N, states, H] after the layers that `wanted` counts; 0
    is before the first.

    Layers after these are not there. `normed`: a last norm follows the last of them.
    """

    embeddings_class: ClassVar[type[VisionEmbeddings]] = VisionEmbeddings

    def __init__(
        self,
        shape: VisionShape,
        wanted: Sequence[int],
        *,
        normed: bool,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.wanted = tuple(wanted)
        dtype = torch_dtype(vllm_config.model.dtype)
        self.embeddings = self.embeddings_class(shape, vllm_config=vllm_config)
        if shape.is_clip:
            # The misspelling is the checkpoints'.
            self.pre_layrnorm = LayerNorm(shape.hidden_size, eps=shape.eps, dtype=dtype)
        self.encoder = VisionLayers(
            shape, max(wanted), vllm_config=vllm_config, prefix=join(prefix, "encoder")
        )
        if normed:
            self.post_layernorm = LayerNorm(shape.hidden_size, eps=shape.eps, dtype=dtype)

    def forward(self, pixels: Tensor, sequences: EncoderSequences) -> list[Tensor]:
        x = self.embeddings(pixels)
        if self.shape.is_clip:
            x = self.pre_layrnorm(x)
        shape, x = x.shape, x.flatten(0, 1)
        kept = {0: x}
        with sequences([self.shape.num_states] * len(pixels)):
            for index, layer in enumerate(self.encoder.layers, 1):
                x = layer(x)
                if index in self.wanted:
                    kept[index] = x
        found = [kept[index] for index in self.wanted]
        if hasattr(self, "post_layernorm"):
            found[-1] = self.post_layernorm(found[-1])
        return [x.view(shape) for x in found]

    def absent(self) -> tuple[str, ...]:
        """Patterns of the names, within the tower, of weights that it does without."""
        layers = range(len(self.encoder.layers), self.shape.num_layers)
        # Buffers of older files; and what pools a picture into one vector, which no language model
        # reads.
        others = (
            r"embeddings\.position_ids$",
            r"head\.",
            *(() if hasattr(self, "post_layernorm") else (r"post_layernorm\.",)),
        )
        return (*(rf"encoder\.layers\.{i}\." for i in layers), *others)


def merged_squares(states: Tensor, merge: int) -> Tensor:
    """States of patches [N, side * side, H] -> of squares of merge x merge of them [N, tokens, H *
    merge²] (pixel shuffle)."""
    count, num_patches, size = states.shape
    tokens = isqrt(num_patches) // merge
    squares = states.view(count, tokens, merge, tokens, merge, size)
    # Rows and columns of squares, then rows and columns within one.
    return squares.permute(0, 1, 3, 2, 4, 5).reshape(count, tokens**2, -1)


class TowerModel(Model):
    """Base of what makes embeddings of pictures: a tower, and what projects its states. Names are
    those of the checkpoint's `model`."""

    packed = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
    # Until transformers 4 a tower stood in a model of its own.
    renames = ((r"^(model\.)?vision_tower\.(vision_model\.)?", "vision_tower."), (r"^model\.", ""))
    vision_tower: VisionTower

    def embeddings(self, pixels: list[Tensor], sequences: EncoderSequences) -> list[Tensor]:
        """Embeddings of each picture [n, H] from pixels [1, channels, S, S]."""
        raise NotImplementedError

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        absent = re.compile(
            rf"^(model\.)?vision_tower\.(vision_model\.)?({'|'.join(self.vision_tower.absent())})"
        )
        return super().load_weights(
            (name, tensor) for name, tensor in weights if not absent.match(name)
        )
