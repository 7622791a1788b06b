"""Qwen3-MoE: Qwen3 with routed experts in some layers, or in all."""

from __future__ import annotations

from toolkit_lm.config import VllmConfig
from toolkit_lm.model import HFConfig, layer_index
from toolkit_lm_decoder.llama import LlamaMLP
from toolkit_lm_decoder.qwen3 import Qwen3Attention
from torch import nn

from toolkit_lm_moe.routed import RoutedBlock, RoutedForCausalLM, num_experts_of


def is_routed(config: HFConfig, layer: int) -> bool:
    """Whether a layer has experts: each `decoder_sparse_step`-th, but for `mlp_only_layers`."""
    if num_experts_of(config) == 0 or layer in config.get("mlp_only_layers", list, []):
        return False
    return (layer + 1) % config.get("decoder_sparse_step", int, 1) == 0


class Qwen3MoeAttention(Qwen3Attention):
    def window(self, config: HFConfig, layer: int) -> int | None:
        return (
            config.require("sliding_window", int)
            if config.get("use_sliding_window", bool, False)
            else None
        )


class Qwen3MoeBlock(RoutedBlock):
    def inner_size(self, config: HFConfig) -> int:
        return config.require("moe_intermediate_size", int)

    def normalizes(self, config: HFConfig) -> bool:
        return config.get("norm_topk_prob", bool, False)


class Qwen3MoeForCausalLM(RoutedForCausalLM):
    attention = Qwen3MoeAttention

    def divides_experts(self) -> bool:
        config = HFConfig(self.vllm_config.hf_config)
        return any(
            is_routed(config, layer) for layer in range(config.require("num_hidden_layers", int))
        )

    @staticmethod
    def feed_forward(*, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        """Routed experts, or, in a layer that has none, a plain feed-forward."""
        routed = is_routed(HFConfig(vllm_config.hf_config), layer_index(prefix))
        return (Qwen3MoeBlock if routed else LlamaMLP)(vllm_config=vllm_config, prefix=prefix)
