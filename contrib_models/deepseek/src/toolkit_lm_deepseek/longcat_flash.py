"""LongCat-Flash: layers of two attentions and two feed-forwards, with routed experts beside the
second half (shortcut-connected), of which some give a token back as it is."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import HFConfig, LayerParts, RMSNorm, Rotation, join
from toolkit_lm_decoder.llama import LlamaDecoderLayer, LlamaMLP, LlamaParts, norm_of
from toolkit_lm_moe.routing import Router, Routing, count_of, num_experts_of
from torch import Tensor, nn

from toolkit_lm_deepseek.attention import DeepseekAttention
from toolkit_lm_deepseek.experts import DeepseekForCausalLM, DeepseekMoE, expect

_NAMES = {
    "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_hidden_size",
    "moe_intermediate_size": "expert_ffn_hidden_size",
    "num_experts_per_tok": "moe_topk",
}
"""What other families call its fields of config.json."""


def num_zero_experts_of(config: HFConfig) -> int:
    return count_of(config, "zero_expert_num", 0, 2**12, 0)


class LongcatFlashAttention(DeepseekAttention):
    """Queries and latents are scaled, as if their ranks were the hidden size."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        size = config.require("hidden_size", int)
        self.query_scale = (size / config.require("q_lora_rank", int)) ** 0.5
        self.latent_scale = (size / self.rank) ** 0.5

    def queries(self, inputs: Tensor) -> Tensor:
        return super().queries(inputs).mul_(self.query_scale)

    def latents(self, x: Tensor) -> Tensor:
        return super().latents(x).mul_(self.latent_scale)


class LongcatFlashAttentions(nn.ModuleList):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(
            LongcatFlashAttention(vllm_config=vllm_config, prefix=join(prefix, str(i)))
            for i in range(2)
        )


class LongcatFlashMoE(DeepseekMoE):
    """Experts after the last routed one, `zero_expert_num`, give a token back as it is."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.num_routed = self.experts.num_experts
        # No rank holds them, so nothing is computed for them.
        self.experts.num_experts += num_zero_experts_of(HFConfig(vllm_config.hf_config))

    def routing_of(self, config: HFConfig) -> Routing:
        experts = num_experts_of(config) + num_zero_experts_of(config)
        return Routing(
            top_k=count_of(config, "num_experts_per_tok", 1, experts),
            scale=config.get("routed_scaling_factor", float, 1.0),
        )

    def router(self, vllm_config: VllmConfig) -> Router:
        config = HFConfig(vllm_config.hf_config)
        experts = num_experts_of(config) + num_zero_experts_of(config)
        return Router(experts, softmax=True, corrected=True, vllm_config=vllm_config)

    def forward(self, x: Tensor) -> Tensor:
        experts, weights = self.routing.choose(self.gate(x), self.gate.e_score_correction_bias)
        kept = weights.masked_fill(experts < self.num_routed, 0).sum(-1, keepdim=True)
        out: Tensor = self.experts(x, experts, weights)
        return out + (x * kept).to(x.dtype)


class LongcatFlashLayer(LlamaDecoderLayer):
    norms = ()

    def __init__(self, parts: type[LlamaParts], *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(parts, vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        for name in LlamaDecoderLayer.norms:
            norms = (norm_of(config, vllm_config, RMSNorm) for _ in range(2))
            self.add_module(name, nn.ModuleList(norms))
        self.mlps = nn.ModuleList(
            LlamaMLP(vllm_config=vllm_config, prefix=join(prefix, f"mlps.{i}")) for i in range(2)
        )

    def parts(self) -> LayerParts | None:
        return None

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        attentions, feeds, before, after = (
            list(self.get_submodule(name).children())
            for name in ("self_attn", "mlps", *LlamaDecoderLayer.norms)
        )
        if residual is None:
            x, residual = before[0](x), x
        else:
            x, residual = before[0](x, residual)
        x, residual = after[0](attentions[0](x, rotation), residual)
        routed = self.mlp(x)
        x, residual = before[1](feeds[0](x), residual)
        x, residual = after[1](attentions[1](x, rotation), residual)
        return feeds[1](x) + routed, residual


class LongcatFlashForCausalLM(DeepseekForCausalLM):
    attention = LongcatFlashAttentions
    layer = LongcatFlashLayer
    moe = LongcatFlashMoE
    renames = ((r"\.mlp\.router\.(classifier\.)?", ".mlp.gate."),)
    ignored = (r"^model\.mtp\.",)

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = HFConfig(vllm_config.hf_config)
        expect(config, "zero_expert_type", "identity")
        # transformers does not add it.
        expect(config, "router_bias", False)
        named = {common: config.require(own, int) for common, own in _NAMES.items()}
        assert vllm_config.checkpoint is not None
        checkpoint = msgspec.structs.replace(
            vllm_config.checkpoint, hf_config={**vllm_config.hf_config, **named}
        )
        super().__init__(vllm_config=vllm_config.with_checkpoint(checkpoint), prefix=prefix)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        # transformers writes gates of experts that have no weights.
        first = num_experts_of(HFConfig(self.vllm_config.hf_config))
        return super().load_weights(
            (name, x) for name, x in weights if not self._is_zero_expert(name, first)
        )

    @staticmethod
    def _is_zero_expert(name: str, first: int) -> bool:
        _, found, rest = name.partition(".mlp.experts.")
        return bool(found) and rest.split(".")[0].isdigit() and int(rest.split(".")[0]) >= first
