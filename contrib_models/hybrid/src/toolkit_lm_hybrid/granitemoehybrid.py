"""Granite 4: Mamba-2 with attention in some layers, factors as in Granite, and experts or none."""

from __future__ import annotations

from collections.abc import Iterable

from toolkit_lm.config import VllmConfig
from toolkit_lm.model import HFConfig, join
from toolkit_lm_decoder.granite import GraniteAttention
from toolkit_lm_decoder.llama import LlamaMLP
from toolkit_lm_moe.experts import split_experts
from toolkit_lm_moe.routed import RoutedBlock, num_experts_of
from torch import Tensor, nn

from toolkit_lm_hybrid.hybrid import HybridForCausalLM, HybridModel, renamed, with_values
from toolkit_lm_hybrid.mamba2 import Mamba2Mixer


class GraniteHybridBlock(nn.Module):
    """Routed experts, if there are any, and a feed-forward that all tokens go to."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        size = config.get("shared_intermediate_size", int, 1024)
        self.shared_mlp = LlamaMLP(
            vllm_config=with_values(vllm_config, intermediate_size=size),
            prefix=join(prefix, "shared_mlp"),
        )
        has_experts = num_experts_of(config) > 0
        self.routed = (
            RoutedBlock(vllm_config=vllm_config, prefix=join(prefix, "routed"))
            if has_experts
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        shared: Tensor = self.shared_mlp(x)
        return shared if self.routed is None else self.routed(x) + shared


class GraniteHybridModel(HybridModel):
    def embedding_scale(self, config: HFConfig) -> float:
        return config.get("embedding_multiplier", float, 1.0)

    def rotates(self, config: HFConfig) -> bool:
        return config.get("position_embedding_type", str) == "rope"


class GraniteMoeHybridForCausalLM(HybridForCausalLM):
    mixers = {
        "linear_attention": {"mamba": Mamba2Mixer},
        "full_attention": {"self_attn": GraniteAttention},
    }
    renames = (
        (r"\.block_sparse_moe\.input_linear\.weight$", ".mlp.routed.experts.gate_up_proj"),
        (r"\.block_sparse_moe\.output_linear\.weight$", ".mlp.routed.experts.down_proj"),
        (r"\.block_sparse_moe\.router\.(layer\.)?", ".mlp.routed.gate."),
        (r"\.shared_mlp\.input_linear\.", ".mlp.shared_mlp.gate_up_proj."),
        (r"\.shared_mlp\.output_linear\.", ".mlp.shared_mlp.down_proj."),
    )
    decoder = GraniteHybridModel
    feed_forward = GraniteHybridBlock

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.divisor = HFConfig(vllm_config.hf_config).get("logits_scaling", float, 1.0)

    @classmethod
    def residual_multiplier(cls, config: HFConfig) -> float:
        return config.get("residual_multiplier", float, 1.0)

    def divides_experts(self) -> bool:
        return num_experts_of(HFConfig(self.vllm_config.hf_config)) > 0

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return super().compute_logits(hidden_states) / self.divisor

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(split_experts(renamed(weights, self.renames[:2])))
