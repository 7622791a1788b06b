"""Kimi Linear: Kimi Delta Attention, and latent attention without positions in some layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from toolkit_lm.config import VllmConfig
from toolkit_lm.model import HFConfig, layer_index
from toolkit_lm_decoder.llama import LlamaMLP
from toolkit_lm_hybrid.hybrid import HybridForCausalLM
from toolkit_lm_hybrid.kimi_delta import KimiDeltaAttention
from toolkit_lm_hybrid.mixer import joined_convolutions
from toolkit_lm_hybrid.mixer_layer import UnrotatedModel
from toolkit_lm_moe.experts import split_experts
from torch import Tensor, nn

from toolkit_lm_deepseek.attention import DeepseekAttention
from toolkit_lm_deepseek.experts import SigmoidMoE, expect

_NAMES = {
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "model_max_length": "max_position_embeddings",
}
"""Fields of config.json, and what DeepSeek-V3 calls them."""
_LINEAR = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Fields of `linear_attn_config`, and what transformers calls them."""


class KimiLinearForCausalLM(HybridForCausalLM):
    packed = {"gate_up_proj": ("gate_proj", "up_proj")}
    renames = (
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.experts\.(\d+)\.w1\.", r".experts.\1.gate_proj."),
        (r"\.experts\.(\d+)\.w3\.", r".experts.\1.up_proj."),
        (r"\.experts\.(\d+)\.w2\.", r".experts.\1.down_proj."),
    )
    mixers = {
        "linear_attention": {"self_attn": KimiDeltaAttention},
        "full_attention": {"self_attn": DeepseekAttention},
    }
    decoder = UnrotatedModel

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = HFConfig(vllm_config.hf_config)
        expect(config, "mla_use_nope", True)
        expect(config, "moe_layer_freq", 1)
        expect(config, "moe_router_activation_func", "sigmoid")
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    @classmethod
    def values(cls, config: HFConfig) -> dict[str, Any]:
        linear = config.get("linear_attn_config", dict, {})
        named = [(_NAMES, config.values), (_LINEAR, linear)]
        return {
            common: stated[own]
            for names, stated in named
            for own, common in names.items()
            if stated.get(own) is not None
        }

    @classmethod
    def layer_kinds(cls, config: HFConfig) -> list[str]:
        if (kinds := config.get("layer_types", list)) is not None:
            return kinds
        count = config.require("num_hidden_layers", int)
        linear = config.get("linear_attn_config", dict, {})
        # Layers are counted from one.
        attention = linear.get("full_attn_layers", [i + 1 for i in range(4, count, 4)])
        return [
            "full_attention" if i + 1 in attention else "linear_attention" for i in range(count)
        ]

    @classmethod
    def is_dense(cls, config: HFConfig, layer: int) -> bool:
        kinds = config.get("mlp_layer_types", list)
        if kinds is not None and layer < len(kinds):
            return bool(kinds[layer] != "sparse")
        return layer < config.get("first_k_dense_replace", int, 1)

    @classmethod
    def feed_forward(cls, *, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        dense = cls.is_dense(HFConfig(vllm_config.hf_config), layer_index(prefix))
        return (LlamaMLP if dense else SigmoidMoE)(vllm_config=vllm_config, prefix=prefix)

    def divides_experts(self) -> bool:
        config = HFConfig(self.vllm_config.hf_config)
        layers = range(config.require("num_hidden_layers", int))
        return not all(self.is_dense(config, layer) for layer in layers)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(split_experts(joined_convolutions(weights)))
