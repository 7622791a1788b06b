"""Qwen3-Next: gated delta nets, gated attention in every fourth layer, and experts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import HFConfig, ReplicatedLinear, join, layer_index
from toolkit_lm_decoder.gemma2 import GemmaRMSNorm
from toolkit_lm_decoder.llama import LlamaMLP
from toolkit_lm_moe.experts import split_experts
from toolkit_lm_moe.qwen3_moe import Qwen3MoeBlock, is_routed
from torch import Tensor, nn

from toolkit_lm_hybrid.gated_attention import GatedAttention
from toolkit_lm_hybrid.gated_delta import GroupedGatedDeltaNet
from toolkit_lm_hybrid.hybrid import HybridForCausalLM, with_values


class SharedExpertBlock(Qwen3MoeBlock):
    """Routed experts, and one that all tokens go to, times the sigmoid of its gate."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        size = config.require("shared_expert_intermediate_size", int)
        self.shared_expert = LlamaMLP(
            vllm_config=with_values(vllm_config, intermediate_size=size),
            prefix=join(prefix, "shared_expert"),
        )
        self.shared_expert_gate = ReplicatedLinear(
            config.require("hidden_size", int),
            1,
            vllm_config=vllm_config,
            prefix=join(prefix, "shared_expert_gate"),
        )

    def normalizes(self, config: HFConfig) -> bool:
        return config.get("norm_topk_prob", bool, True)

    def forward(self, x: Tensor) -> Tensor:
        shared: Tensor = torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return super().forward(x) + shared


class Qwen3NextForCausalLM(HybridForCausalLM):
    ignored = (r"rotary_emb\.inv_freq$|^mtp\.",)
    mixers = {
        "linear_attention": {"linear_attn": GroupedGatedDeltaNet},
        "full_attention": {"self_attn": GatedAttention},
    }
    norm = GemmaRMSNorm
    partial_rotary_factor = 0.25

    def divides_experts(self) -> bool:
        return HFConfig(self.vllm_config.hf_config).get("num_experts", int, 0) > 0

    @staticmethod
    def feed_forward(*, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        routed = is_routed(HFConfig(vllm_config.hf_config), layer_index(prefix))
        return (SharedExpertBlock if routed else LlamaMLP)(vllm_config=vllm_config, prefix=prefix)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(split_experts(weights))
