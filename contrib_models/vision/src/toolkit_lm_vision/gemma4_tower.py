"""Gemma 4's vision tower: patches of a picture of any size in, a state of each square of them
out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from toolkit_lm.attention import Attention, AttentionType
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    Shard,
    ShardLoader,
    get_activation,
    join,
    new_parameter,
    torch_dtype,
)
from toolkit_lm.parts import EncoderSequences
from toolkit_lm_decoder.per_layer import Float32RMSNorm, UnitRMSNorm
from torch import Tensor, nn

from toolkit_lm_vision.gemma4_rules import Gemma4Shape

_CLIPS = ("input_min", "input_max", "output_min", "output_max")
Turns = tuple[Tensor, Tensor]
"""Cosines and sines [N, 1, 2, head size / 2] of columns and rows."""


class ClippedLinear(nn.Module):
    """A linear layer of class `kind` without bias; where the checkpoint has bounds, what it reads
    and what it gives are within them."""

    def __init__(
        self,
        kind: type[nn.Module],
        input_size: int,
        output_size: int,
        *,
        shape: Gemma4Shape,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        super().__init__()
        self.linear = kind(
            input_size, output_size, vllm_config=vllm_config, prefix=join(prefix, "linear")
        )
        self.is_clipped = shape.is_clipped
        if shape.is_clipped:
            dtype = torch_dtype(vllm_config.model.dtype)
            for name in _CLIPS:
                self.register_parameter(
                    name, nn.Parameter(torch.empty((), dtype=dtype), requires_grad=False)
                )

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_clipped:
            plain: Tensor = self.linear(x)
            return plain
        least, most, out_least, out_most = (self.get_parameter(name) for name in _CLIPS)
        return torch.clamp(self.linear(torch.clamp(x, least, most)), out_least, out_most)


class Gemma4VisionAttention(nn.Module):
    """x [N, H] -> attention(x) [N, H]: all patches of a picture see each other."""

    def __init__(self, shape: Gemma4Shape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.head_size = shape.head_size
        heads = Shard.even(shape.num_heads, vllm_config.parallel, f"attention heads of {prefix}")
        kv = Shard.even(shape.num_kv_heads, vllm_config.parallel, f"KV heads of {prefix}")
        for name, count in (
            ("q_proj", shape.num_heads),
            ("k_proj", shape.num_kv_heads),
            ("v_proj", shape.num_kv_heads),
        ):
            layer = ClippedLinear(
                ColumnParallelLinear,
                shape.hidden_size,
                count * shape.head_size,
                shape=shape,
                vllm_config=vllm_config,
                prefix=join(prefix, name),
            )
            self.add_module(name, layer)
        self.o_proj = ClippedLinear(
            RowParallelLinear,
            shape.num_heads * shape.head_size,
            shape.hidden_size,
            shape=shape,
            vllm_config=vllm_config,
            prefix=join(prefix, "o_proj"),
        )
        self.q_norm = Float32RMSNorm(shape.head_size, eps=shape.eps, vllm_config=vllm_config)
        self.k_norm = Float32RMSNorm(shape.head_size, eps=shape.eps, vllm_config=vllm_config)
        self.v_norm = UnitRMSNorm(shape.head_size, eps=shape.eps)
        self.attn = Attention(
            heads.size,
            shape.head_size,
            num_kv_heads=kv.size,
            scale=1.0,
            type=AttentionType.ENCODER,
            vllm_config=vllm_config,
            prefix=join(prefix, "attn"),
        )

    def forward(self, x: Tensor, turns: Turns) -> Tensor:
        q, k, v = (
            self.get_submodule(name)(x).view(len(x), -1, self.head_size)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        out: Tensor = self.o_proj(
            self.attn(
                _turned(self.q_norm(q), turns), _turned(self.k_norm(k), turns), self.v_norm(v)
            )
        )
        return out


def _turned(x: Tensor, turns: Turns) -> Tensor:
    """Heads [N, heads, D], of which one half is turned by the column of a patch, the other by its
    row."""
    cos, sin = turns
    halves = x.view(*x.shape[:2], 2, -1)
    first, second = halves.chunk(2, dim=-1)
    turned: Tensor = halves * cos + torch.cat((-second, first), dim=-1) * sin
    return turned.flatten(-2)


class Gemma4VisionMLP(nn.Module):
    """x [N, H] -> gated feed-forward(x) [N, H]."""

    def __init__(self, shape: Gemma4Shape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        sizes = (shape.hidden_size, shape.inner_size)
        for name in ("gate_proj", "up_proj", "down_proj"):
            is_last = name == "down_proj"
            layer = ClippedLinear(
                RowParallelLinear if is_last else ColumnParallelLinear,
                *(sizes[::-1] if is_last else sizes),
                shape=shape,
                vllm_config=vllm_config,
                prefix=join(prefix, name),
            )
            self.add_module(name, layer)
        self.activation = get_activation(shape.activation)

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (
            self.get_submodule(name) for name in ("gate_proj", "up_proj", "down_proj")
        )
        out: Tensor = down(self.activation(gate(x)) * up(x))
        return out


class Gemma4VisionLayer(nn.Module):
    """x [N, H] -> [N, H]."""

    def __init__(self, shape: Gemma4Shape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()

        def norm() -> Float32RMSNorm:
            return Float32RMSNorm(shape.hidden_size, eps=shape.eps, vllm_config=vllm_config)

        self.self_attn = Gemma4VisionAttention(
            shape, vllm_config=vllm_config, prefix=join(prefix, "self_attn")
        )
        self.mlp = Gemma4VisionMLP(shape, vllm_config=vllm_config, prefix=join(prefix, "mlp"))
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.post_feedforward_layernorm = norm()

    def forward(self, x: Tensor, turns: Turns) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), turns)
        x = x + self.post_attention_layernorm(attended)
        out: Tensor = x + self.post_feedforward_layernorm(
            self.mlp(self.pre_feedforward_layernorm(x))
        )
        return out


class Gemma4Patches(nn.Module):
    """Patches [N, numbers of a patch], and their columns and rows [N, 2] -> [N, H]."""

    def __init__(self, shape: Gemma4Shape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.dtype = torch_dtype(vllm_config.model.dtype)
        self.input_proj = ReplicatedLinear(
            shape.patch_values,
            shape.hidden_size,
            vllm_config=vllm_config,
            prefix=join(prefix, "input_proj"),
        )
        self.position_embedding_table = new_parameter(
            (2, shape.num_positions, shape.hidden_size),
            self.dtype,
            ShardLoader((Shard.whole(2),)),
        )

    def forward(self, patches: Tensor, places: Tensor) -> Tensor:
        columns, rows = self.position_embedding_table
        x: Tensor = self.input_proj((2 * (patches - 0.5)).to(self.dtype))
        placed: Tensor = x + (columns[places[:, 0]] + rows[places[:, 1]])
        return placed


class Gemma4Encoder(nn.Module):
    """The layers, under their name in checkpoints."""

    def __init__(self, shape: Gemma4Shape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Gemma4VisionLayer(shape, vllm_config=vllm_config, prefix=join(prefix, f"layers.{i}"))
            for i in range(shape.num_layers)
        )


class Gemma4Tower(nn.Module):
    """Patches of pictures [n, numbers of a patch], row after row, and the places of each [n, 2] ->
    states of squares of them, one picture after the other [N / pooled², H]."""

    def __init__(self, shape: Gemma4Shape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embedder = Gemma4Patches(
            shape, vllm_config=vllm_config, prefix=join(prefix, "patch_embedder")
        )
        self.encoder = Gemma4Encoder(shape, vllm_config=vllm_config, prefix=join(prefix, "encoder"))
        if shape.is_standardized:
            dtype = torch_dtype(vllm_config.model.dtype)
            whole = ShardLoader((Shard.whole(shape.hidden_size),))
            self.std_bias = new_parameter((shape.hidden_size,), dtype, whole)
            self.std_scale = new_parameter((shape.hidden_size,), dtype, whole)

    def forward(
        self, patches: Sequence[Tensor], places: Sequence[Tensor], sequences: EncoderSequences
    ) -> Tensor:
        every = torch.cat(list(places))
        x: Tensor = self.patch_embedder(torch.cat(list(patches)), every)
        turns = self._turns(every, x.dtype)
        sizes = [len(picture) for picture in patches]
        with sequences(sizes):
            for layer in self.encoder.layers:
                x = layer(x, turns)
        pooled = torch.cat(
            [
                self._pooled(part, int(at[:, 0].max()) + 1)
                for part, at in zip(torch.split(x, sizes), places, strict=True)
            ]
        )
        # In float32: what the factor makes may be more than float16 holds.
        scaled = pooled.float() * self.shape.hidden_size**0.5
        if self.shape.is_standardized:
            scaled = (scaled - self.std_bias.float()) * self.std_scale.float()
        states: Tensor = scaled.to(x.dtype)
        return states

    def _turns(self, places: Tensor, dtype: torch.dtype) -> Turns:
        size = self.shape.head_size // 2
        steps = torch.arange(0, size, 2, dtype=torch.float32, device=places.device) / size
        angles = places[..., None].float() * (1.0 / self.shape.theta**steps)
        both = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        return both.cos().to(dtype), both.sin().to(dtype)

    def _pooled(self, states: Tensor, width: int) -> Tensor:
        """States of a picture [n, H] -> means of squares of them [n / pooled², H]."""
        side = self.shape.pooled
        if side == 1:
            return states
        squares = states.float().view(-1, side, width // side, side, states.shape[-1])
        means: Tensor = squares.mean((1, 3)).flatten(0, 1).to(states.dtype)
        return means
