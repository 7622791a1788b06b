"""Gemma 4 (text): layers that read the keys of earlier ones, global layers with larger heads and
values that are their keys, embeddings of each layer, and routed experts beside a feed-forward."""

from __future__ import annotations

from typing import Any

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import (
    FusibleLayer,
    HFConfig,
    LayerParts,
    ReplicatedLinear,
    RMSNorm,
    Rotation,
    Shard,
    ShardLoader,
    join,
    new_parameter,
    torch_dtype,
)
from toolkit_lm_decoder.gemma2 import GemmaMLP
from toolkit_lm_decoder.llama import LlamaParts, eps_of, norm_of
from toolkit_lm_decoder.per_layer import (
    PerLayerDecoderLayer,
    PerLayerForCausalLM,
    PerLayerModel,
    SharedKV,
    SharedKVAttention,
    UnitRMSNorm,
    activation_of,
    first_reader,
    window_of,
)
from toolkit_lm_rotary import RopeParameters, RotaryEmbedding
from torch import Tensor, nn

from toolkit_lm_moe.experts import RoutedExperts, route_top_k, split_experts

_ROPE: dict[str, dict[str, Any]] = {
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
"""Rope parameters where config.json states none."""


def of_kind(config: HFConfig, key: str, kind: str, stated: str, default: int | None) -> int:
    """A value of layers of a kind. Global layers have their own: in `per_layer_config`, or under
    the key `stated`."""
    if kind == "full_attention":
        for layer, values in config.get("per_layer_config", dict, {}).items():
            if window_of(config, int(layer), Gemma4Attention.pattern) is None and key in values:
                return HFConfig(values).require(key, int)
        found = None if "per_layer_config" in config.values else config.get(stated, int, default)
        if found is not None:
            return found
    return config.require(key, int)


class Gemma4Attention(SharedKVAttention):
    pattern = 6

    def window(self, config: HFConfig, layer: int) -> int | None:
        # The last layer is global, whatever `layer_types` says.
        is_last = layer == config.require("num_hidden_layers", int) - 1
        return None if is_last else window_of(config, layer, self.pattern)

    def head_size_of(self, config: HFConfig, kind: str) -> int:
        return of_kind(config, "head_dim", kind, "global_head_dim", 512)

    def num_kv_heads_of(self, config: HFConfig, kind: str) -> int:
        stated = "num_global_key_value_heads"
        return (
            of_kind(config, "num_key_value_heads", kind, stated, None)
            if config.get("attention_k_eq_v", bool, False)
            else config.require("num_key_value_heads", int)
        )

    def has_values(self, config: HFConfig, kind: str) -> bool:
        return kind != "full_attention" or not config.get("attention_k_eq_v", bool, False)


class Gemma4MLP(GemmaMLP):
    def inner_size(self, config: HFConfig, layer: int) -> int:
        is_wide = config.get("use_double_wide_mlp", bool, False) and layer >= first_reader(config)
        return super().inner_size(config, layer) * (2 if is_wide else 1)


class Gemma4Router(nn.Module):
    """x [T, H] -> the experts of each token [T, K] (int64), and their weights [T, K] (float32)."""

    def __init__(self, num_experts: int, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        hidden_size = config.require("hidden_size", int)
        self.top_k = config.require("top_k_experts", int)
        if not 1 <= self.top_k <= num_experts:
            raise CheckpointError(
                f"config.json: 'top_k_experts' must be 1 to {num_experts} (the experts), "
                f"not {self.top_k}."
            )
        dtype = torch_dtype(vllm_config.model.dtype)
        self.norm = UnitRMSNorm(hidden_size, eps=eps_of(config))
        self.proj = ReplicatedLinear(
            hidden_size, num_experts, vllm_config=vllm_config, prefix=join(prefix, "proj")
        )
        self.root = hidden_size**-0.5
        self.scale = _vector(hidden_size, dtype)
        self.per_expert_scale = _vector(num_experts, dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.proj(self.norm(x) * self.scale * self.root)
        experts, weights = route_top_k(scores, self.top_k, normalize=True)
        return experts, weights * self.per_expert_scale[experts]


def _vector(size: int, dtype: torch.dtype) -> nn.Parameter:
    return new_parameter((size,), dtype, ShardLoader((Shard.whole(size),)))


class Gemma4DecoderLayer(PerLayerDecoderLayer, FusibleLayer):
    seams = frozenset({"norms", "parts"})
    post_feedforward_layernorm_1: RMSNorm
    post_feedforward_layernorm_2: RMSNorm
    pre_feedforward_layernorm_2: RMSNorm

    def __init__(self, parts: type[LlamaParts], *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(parts, vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        self.layer_scalar = _vector(1, torch_dtype(vllm_config.model.dtype))
        self.has_experts = config.get("enable_moe_block", bool, False)
        if not self.has_experts:
            return
        for name in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2"):
            self.add_module(name, norm_of(config, vllm_config, parts.norm))
        self.pre_feedforward_layernorm_2 = norm_of(config, vllm_config, parts.norm)
        num_experts = config.require("num_experts", int)
        self.router = Gemma4Router(
            num_experts, vllm_config=vllm_config, prefix=join(prefix, "router")
        )
        self.experts = RoutedExperts(
            num_experts,
            config.require("hidden_size", int),
            config.require("moe_intermediate_size", int),
            activation=activation_of(config),
            vllm_config=vllm_config,
            prefix=join(prefix, "experts"),
        )

    def parts(self) -> LayerParts | None:
        attention: Any = self.self_attn
        mlp: Any = self.mlp
        if self.has_experts:
            return None
        gate = None
        if hasattr(self, "per_layer_input_gate"):
            norm = self.post_per_layer_input_norm
            gate = self.per_layer_input_gate, self.per_layer_projection, norm
        return LayerParts(
            input_norm=self.input_layernorm,
            qkv=attention.get_submodule(attention.name),
            head_norms=(attention.q_norm, *(() if attention.reads else (attention.k_norm,))),
            value_norm=None if attention.reads else attention.v_norm,
            attn=attention.attn,
            out=attention.o_proj,
            post_norm=self.pre_feedforward_layernorm,
            out_norms=(self.post_attention_layernorm, self.post_feedforward_layernorm),
            gate_up=mlp.gate_up_proj,
            down=mlp.down_proj,
            scalar=self.layer_scalar,
            gate=gate,
        )

    def forward(
        self,
        x: Tensor,
        residual: None,
        rotation: Rotation,
        embedding: Tensor | None,
        shared: SharedKV,
    ) -> tuple[Tensor, None]:
        attended = self.self_attn(self.input_layernorm(x), rotation, shared)
        x = x + self.post_attention_layernorm(attended)
        out = self.mlp(self.pre_feedforward_layernorm(x))
        if self.has_experts:
            routed = self.experts(self.pre_feedforward_layernorm_2(x), *self.router(x))
            out = self.post_feedforward_layernorm_1(out) + self.post_feedforward_layernorm_2(routed)
        x = x + self.post_feedforward_layernorm(out)
        if embedding is not None:
            x = x + self.gated(x, embedding)
        return x * self.layer_scalar, None


class Gemma4Model(PerLayerModel):
    def _rotary_of(self, config: HFConfig, kind: str) -> RotaryEmbedding:
        rope = config.get("rope_parameters", dict, _ROPE)
        values = {**config.values, "rope_parameters": rope.get(kind, _ROPE[kind])}
        size = of_kind(config, "head_dim", kind, "global_head_dim", 512)
        parameters = RopeParameters.read(HFConfig(values), size)
        return RotaryEmbedding(parameters, vllm_config=self.vllm_config)


class Gemma4ForCausalLM(PerLayerForCausalLM):
    attention = Gemma4Attention
    feed_forward = Gemma4MLP
    layer = Gemma4DecoderLayer
    decoder = Gemma4Model

    def divides_experts(self) -> bool:
        return HFConfig(self.vllm_config.hf_config).get("enable_moe_block", bool, False)

    def load_weights(self, weights: Any) -> set[str]:
        return super().load_weights(split_experts(weights))
