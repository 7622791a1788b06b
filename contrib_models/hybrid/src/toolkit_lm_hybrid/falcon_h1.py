"""Falcon-H1: Mamba-2 and attention in parallel in each layer, and many factors."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import (
    HFConfig,
    MergedColumnParallelLinear,
    Rotation,
    RowParallelLinear,
    get_activation,
    join,
)
from toolkit_lm_decoder.llama import LlamaAttention
from torch import Tensor, nn

from toolkit_lm_hybrid.hybrid import HybridForCausalLM, HybridLayer, HybridModel, HybridParts
from toolkit_lm_hybrid.mamba2 import Mamba2Mixer, Mamba2Shape


def factors(config: HFConfig, key: str, count: int) -> list[float]:
    """`count` factors; 1 where config.json states none."""
    values = config.get(key, list, [1.0] * count)
    if len(values) != count or not all(isinstance(value, int | float) for value in values):
        raise CheckpointError(f"config.json: {key!r} must be {count} numbers, not {values!r}.")
    return [float(value) for value in values]


class FalconH1Attention(LlamaAttention):
    def scale(self, config: HFConfig) -> float:
        return config.get("key_multiplier", float, 1.0) / math.sqrt(self.head_size)


class FalconH1Mixer(Mamba2Mixer):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        self.multiplier = config.get("ssm_in_multiplier", float, 1.0)
        self.multipliers = factors(config, "ssm_multipliers", 5)

    def shape(self, config: HFConfig) -> Mamba2Shape:
        shape = Mamba2Shape.read(config)
        return shape._replace(
            inner_size=config.get("mamba_d_ssm", int, shape.inner_size),
            norm=config.get("mamba_rms_norm", bool, False),
            gate_first=not config.get("mamba_norm_before_gate", bool, True),
        )

    def has_output_bias(self, config: HFConfig, shape: Mamba2Shape) -> bool:
        return config.get("projectors_bias", bool, False)

    def project(self, x: Tensor) -> Tensor:
        projected = super().project(x * self.multiplier)
        sizes = [self.sizes[0], *self.conv_sizes, self.num_heads]
        for part, factor in zip(torch.split(projected, sizes, -1), self.multipliers, strict=True):
            part.mul_(factor)
        return projected


class FalconH1MLP(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        sizes = config.require("hidden_size", int), config.require("intermediate_size", int)
        options: dict[str, Any] = {
            "bias": config.get("mlp_bias", bool, False),
            "vllm_config": vllm_config,
        }
        self.gate_up_proj = MergedColumnParallelLinear(
            sizes[0], [sizes[1]] * 2, prefix=join(prefix, "gate_up_proj"), **options
        )
        self.down_proj = RowParallelLinear(
            *sizes[::-1], prefix=join(prefix, "down_proj"), **options
        )
        self.activation = get_activation(config.get("hidden_act", str, "silu"))
        self.multipliers = factors(config, "mlp_multipliers", 2)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        inner = self.activation(gate * self.multipliers[0]) * up
        out: Tensor = self.down_proj(inner) * self.multipliers[1]
        return out


class FalconH1Layer(HybridLayer):
    def __init__(self, parts: type[HybridParts], *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(parts, vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        self.attention_in = config.get("attention_in_multiplier", float, 1.0)
        self.attention_out = config.get("attention_out_multiplier", float, 1.0)
        self.ssm_out = config.get("ssm_out_multiplier", float, 1.0)

    def mix(self, x: Tensor, rotation: Rotation) -> Tensor:
        attended = self.mix_by("self_attn", x * self.attention_in, rotation) * self.attention_out
        return self.mix_by("mamba", x, rotation) * self.ssm_out + attended


class FalconH1Model(HybridModel):
    def embedding_scale(self, config: HFConfig) -> float:
        return config.get("embedding_multiplier", float, 1.0)


class FalconH1ForCausalLM(HybridForCausalLM):
    renames = (
        (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
        (r"\.feed_forward\.", ".mlp."),
        (r"\.final_layernorm\.", ".norm."),
    )
    mixers = {"hybrid": {"mamba": FalconH1Mixer, "self_attn": FalconH1Attention}}
    feed_forward = FalconH1MLP
    layer: ClassVar[Any] = FalconH1Layer
    decoder = FalconH1Model

    @classmethod
    def layer_kinds(cls, config: HFConfig) -> list[str]:
        return ["hybrid"] * config.require("num_hidden_layers", int)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        factor = HFConfig(self.vllm_config.hf_config).get("lm_head_multiplier", float, 1.0)
        return super().compute_logits(hidden_states) * factor
