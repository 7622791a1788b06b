"""LFM2-MoE: LFM2 with routed experts after the first layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from toolkit_lm.config import VllmConfig
from toolkit_lm.model import HFConfig, join, layer_index
from toolkit_lm_decoder.llama import LlamaMLP
from toolkit_lm_moe.experts import RoutedExperts, split_experts
from toolkit_lm_moe.routed import num_experts_of
from toolkit_lm_moe.routing import Router, Routing, count_of
from torch import Tensor, nn

from toolkit_lm_hybrid.lfm2 import Lfm2ForCausalLM, lfm_values


class Lfm2MoeBlock(nn.Module):
    """Experts routed by sigmoid scores, with a bias that balances them: x [T, H] -> [T, H]."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        count = num_experts_of(config)
        self.routing = Routing(
            top_k=count_of(config, "num_experts_per_tok", 1, count),
            scale=config.get("routed_scaling_factor", float, 1.0),
            normalize=config.get("norm_topk_prob", bool, True),
            eps=1e-6,
        )
        self.gate = Router(
            count,
            softmax=False,
            corrected=config.get("use_expert_bias", bool, True),
            vllm_config=vllm_config,
        )
        self.experts = RoutedExperts(
            count,
            config.require("hidden_size", int),
            config.require("moe_intermediate_size", int),
            vllm_config=vllm_config,
            prefix=join(prefix, "experts"),
        )

    def forward(self, x: Tensor) -> Tensor:
        experts, weights = self.routing.choose(self.gate(x), self.gate.e_score_correction_bias)
        out: Tensor = self.experts(x, experts, weights)
        return out


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    renames = (
        (r"\.feed_forward\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
        *Lfm2ForCausalLM.renames,
    )

    @classmethod
    def values(cls, config: HFConfig) -> dict[str, Any]:
        return lfm_values(config)

    @classmethod
    def is_dense(cls, config: HFConfig, layer: int) -> bool:
        return layer < config.get("num_dense_layers", int, 2)

    @classmethod
    def feed_forward(cls, *, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        dense = cls.is_dense(HFConfig(vllm_config.hf_config), layer_index(prefix))
        return (LlamaMLP if dense else Lfm2MoeBlock)(vllm_config=vllm_config, prefix=prefix)

    def divides_experts(self) -> bool:
        config = HFConfig(self.vllm_config.hf_config)
        return not self.is_dense(config, config.require("num_hidden_layers", int) - 1)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(split_experts(weights))
