"""Llama 4 (text): attention in chunks, layers without rotation whose temperature grows with the
position, and experts beside a shared one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from msgspec import structs
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import HFConfig, Rotation, join, layer_index
from toolkit_lm_decoder.llama import (
    LlamaAttention,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
    eps_of,
    head_size_of,
)
from toolkit_lm_decoder.per_layer import UnitRMSNorm
from toolkit_lm_rotary import RopeParameters, RotaryEmbedding
from torch import Tensor, nn

from toolkit_lm_moe.experts import split_experts
from toolkit_lm_moe.routed import RoutedBlock, RoutedForCausalLM

_STACKED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")


def rotates(config: HFConfig, layer: int) -> bool:
    """Whether a layer rotates queries and keys."""
    stated = config.get("no_rope_layers", list) or []
    interval = config.get("no_rope_layer_interval", int, 4)
    return bool(stated[layer]) if layer < len(stated) else (layer + 1) % interval != 0


def chunk_size(vllm_config: VllmConfig, layer: int) -> int | None:
    """Length of the chunks in which a layer attends. None: no sequence is longer than one."""
    config = HFConfig(vllm_config.hf_config)
    kinds = config.get("layer_types", list)
    if kinds is None:
        is_chunked = rotates(config, layer)
    elif layer < len(kinds) and kinds[layer] in ("chunked_attention", "full_attention"):
        is_chunked = kinds[layer] == "chunked_attention"
    else:
        raise CheckpointError(
            "config.json: 'layer_types' must name one of chunked_attention, full_attention for "
            f"layer {layer}, not {kinds[layer] if layer < len(kinds) else None!r}."
        )
    size = config.get("attention_chunk_size", int)
    is_cut = is_chunked and size is not None and size < vllm_config.max_model_len
    return size if is_cut else None


@dataclass(frozen=True, slots=True)
class ChunkBias:
    """An AttentionBias that hides keys of other chunks than the query's."""

    num_heads: int
    size: int

    def __call__(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        hidden = q_positions[:, None] // self.size != k_positions // self.size
        bias = torch.zeros(hidden.shape, device=hidden.device)
        return bias.masked_fill_(hidden, float("-inf")).expand(self.num_heads, -1, -1)


@dataclass(frozen=True, slots=True)
class Temperature:
    """Factors of queries [T, 1, 1], which a layer without rotation gets in its place."""

    factors: Tensor | None


class Llama4Attention(LlamaAttention):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        layer = layer_index(prefix)
        self.rotates = rotates(config, layer)
        norms = self.rotates and config.get("use_qk_norm", bool, True)
        self.qk_norm = UnitRMSNorm(self.head_size, eps=eps_of(config)) if norms else None
        if (size := chunk_size(vllm_config, layer)) is not None:
            bias = ChunkBias(self.qkv_proj.num_heads, size)
            self.attn.params = replace(self.attn.params, window=size, bias=bias)

    def project(self, x: Tensor, rotation: Rotation | Temperature) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.qkv_proj(x)
        turned = qkv[:, : self.rotated_size].view(len(qkv), -1, self.head_size)
        if isinstance(rotation, Rotation):
            turned = rotation.rotate(turned.float()).to(x.dtype)
            turned = turned if self.qk_norm is None else self.qk_norm(turned)
        num_heads = self.qkv_proj.num_heads
        q = turned[:, :num_heads]
        k = turned[:, num_heads:]
        if isinstance(rotation, Temperature) and rotation.factors is not None:
            q = (q * rotation.factors).to(q.dtype)
        return q.view(len(x), -1), k.view(len(x), -1), qkv[:, self.rotated_size :]


class Llama4MLP(LlamaMLP):
    def inner_size(self, config: HFConfig, layer: int) -> int:
        return config.get("intermediate_size_mlp", int, 16_384)


class Llama4Block(RoutedBlock):
    """A token enters an expert times its weight. All tokens enter the shared expert."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.shared_expert = LlamaMLP(vllm_config=vllm_config, prefix=join(prefix, "shared_expert"))

    def forward(self, x: Tensor) -> Tensor:
        scores, experts = self.gate(x).topk(self.top_k, dim=-1)
        entered = x.unsqueeze(1) * scores.float().sigmoid().to(x.dtype).unsqueeze(2)
        weights = torch.ones(experts.numel(), 1, device=x.device)
        routed = self.experts(entered.flatten(0, 1), experts.view(-1, 1), weights)
        out: Tensor = self.shared_expert(x) + routed.view(entered.shape).sum(1)
        return out


class Llama4Model(LlamaModel):
    def _rotary(self, config: HFConfig) -> RotaryEmbedding:
        # Meta's rotation is in float32, whatever the model's dtype.
        of_floats = structs.replace(
            self.vllm_config, model=structs.replace(self.vllm_config.model, dtype="float32")
        )
        parameters = RopeParameters.read(config, head_size_of(config))
        return RotaryEmbedding(parameters, interleaved=True, vllm_config=of_floats)

    def rotations(  # type: ignore[override]
        self, positions: Tensor
    ) -> list[Rotation | Temperature]:
        config = HFConfig(self.vllm_config.hf_config)
        factors = None
        if config.get("attn_temperature_tuning", bool, True):
            steps = ((positions.float() + 1) / config.get("floor_scale", int, 8192)).floor_()
            factors = steps.log1p_().mul_(config.get("attn_scale", float, 0.1)).add_(1)
            factors = factors.view(-1, 1, 1)
        rotation = self.rotary(positions)
        owned: tuple[Any, ...] = self.layers.owned
        return [rotation if layer.self_attn.rotates else Temperature(factors) for layer in owned]


class Llama4ForCausalLM(RoutedForCausalLM):
    renames = ((r"\.feed_forward\.", ".mlp."), (r"\.router\.", ".gate."))
    attention = Llama4Attention
    decoder = Llama4Model

    @staticmethod
    def feed_forward(*, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        """Experts, or, in a layer that has none, a plain feed-forward."""
        routed = is_routed(HFConfig(vllm_config.hf_config), layer_index(prefix))
        return (Llama4Block if routed else Llama4MLP)(vllm_config=vllm_config, prefix=prefix)

    def divides_experts(self) -> bool:
        config = HFConfig(self.vllm_config.hf_config)
        layers = range(config.require("num_hidden_layers", int))
        return any(is_routed(config, layer) for layer in layers)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        # All experts in one tensor: [E, inputs, outputs].
        turned = (
            (name, tensor.mT if _STACKED.search(name) and tensor.ndim == 3 else tensor)
            for name, tensor in weights
        )
        return LlamaForCausalLM.load_weights(self, split_experts(turned))


def is_routed(config: HFConfig, layer: int) -> bool:
    """Whether a layer has experts: one of `moe_layers`, or each `interleave_moe_layer_step`-th."""
    stated = config.get("moe_layers", list)
    step = config.get("interleave_moe_layer_step", int, 1)
    return layer in stated if stated is not None else (layer + 1) % step == 0
