"""Feed-forwards of the DeepSeek families: experts of which a token goes to a few, and those that
all tokens share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import (
    GatedColumnParallelLinear,
    HFConfig,
    RowParallelLinear,
    join,
    layer_index,
)
from toolkit_lm_decoder.llama import LlamaForCausalLM, LlamaMLP, LlamaModel
from toolkit_lm_moe.experts import RoutedExperts, split_experts
from toolkit_lm_moe.routing import Router, Routing, num_experts_of
from torch import Tensor, nn

from toolkit_lm_deepseek.attention import DeepseekAttention, DeepseekModel


def expect(config: HFConfig, key: str, known: str | int | bool) -> None:
    """Raises UnsupportedError if config.json states another value than the one that is known."""
    found = config.values.get(key)
    if found is not None and found != known:
        raise UnsupportedError(
            f"config.json: {key!r} is {found!r}, and this model is computed with {known!r} only."
        )


class SharedExperts(nn.Module):
    """Gated feed-forward of `n_shared_experts` experts side by side: x [T, H] -> [T, H]."""

    def __init__(self, inner_size: int, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        hidden_size = config.require("hidden_size", int)
        bias = config.get("mlp_bias", bool, False)
        self.gate_up_proj = GatedColumnParallelLinear(
            hidden_size,
            inner_size,
            activation=config.get("hidden_act", str, "silu"),
            bias=bias,
            vllm_config=vllm_config,
            prefix=join(prefix, "gate_up_proj"),
        )
        self.down_proj = RowParallelLinear(
            inner_size,
            hidden_size,
            bias=bias,
            vllm_config=vllm_config,
            prefix=join(prefix, "down_proj"),
        )

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`residual` [T, H] is added."""
        out: Tensor = self.down_proj(self.gate_up_proj(x), residual)
        return out


class DeepseekMoE(nn.Module):
    """Routed experts and shared ones: x [T, H] -> [T, H]."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        self.routing = self.routing_of(config)
        self.gate = self.router(vllm_config)
        inner_size = config.require("moe_intermediate_size", int)
        self.experts = RoutedExperts(
            num_experts_of(config),
            config.require("hidden_size", int),
            inner_size,
            activation=config.get("hidden_act", str, "silu"),
            vllm_config=vllm_config,
            prefix=join(prefix, "experts"),
        )
        num_shared = config.get("n_shared_experts", int, 0)
        self.shared_experts = (
            SharedExperts(
                num_shared * inner_size,
                vllm_config=vllm_config,
                prefix=join(prefix, "shared_experts"),
            )
            if num_shared
            else None
        )

    def routing_of(self, config: HFConfig) -> Routing:
        raise NotImplementedError

    def router(self, vllm_config: VllmConfig) -> Router:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        experts, weights = self.routing.choose(self.gate(x), self.gate.e_score_correction_bias)
        out: Tensor = self.experts(x, experts, weights)
        return out if self.shared_experts is None else self.shared_experts(x, out)


class SigmoidMoE(DeepseekMoE):
    """Routing of DeepSeek-V3: sigmoid scores, and a bias that balances experts."""

    def routing_of(self, config: HFConfig) -> Routing:
        expect(config, "scoring_func", "sigmoid")
        expect(config, "topk_method", "noaux_tc")
        return Routing.read(config, normalize=config.get("norm_topk_prob", bool, True), best=2)

    def router(self, vllm_config: VllmConfig) -> Router:
        config = HFConfig(vllm_config.hf_config)
        return Router(
            num_experts_of(config), softmax=False, corrected=True, vllm_config=vllm_config
        )


class DeepseekForCausalLM(LlamaForCausalLM):
    """A decoder with multi-head latent attention and, from some layer on, experts.

    The layers after the last one, which predict further tokens (`num_nextn_predict_layers`), are
    left out.
    """

    packed = {"gate_up_proj": ("gate_proj", "up_proj")}
    attention: ClassVar[type[nn.Module]] = DeepseekAttention
    decoder: ClassVar[type[LlamaModel]] = DeepseekModel
    moe: ClassVar[type[DeepseekMoE]]
    chooses_tokens: ClassVar[bool] = False
    """Whether attention has an indexer."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = HFConfig(vllm_config.hf_config)
        expect(config, "moe_layer_freq", 1)
        if config.values.get("index_topk") is not None and not self.chooses_tokens:
            raise UnsupportedError(
                "config.json: 'index_topk' asks for sparse attention by an indexer, and this model "
                "attends to all tokens."
            )
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    @classmethod
    def is_dense(cls, config: HFConfig, layer: int) -> bool:
        """Whether a layer has a plain feed-forward: the first `first_k_dense_replace`."""
        return layer < config.get("first_k_dense_replace", int, 0)

    @classmethod
    def feed_forward(cls, *, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        dense = cls.is_dense(HFConfig(vllm_config.hf_config), layer_index(prefix))
        return (LlamaMLP if dense else cls.moe)(vllm_config=vllm_config, prefix=prefix)

    def divides_experts(self) -> bool:
        config = HFConfig(self.vllm_config.hf_config)
        return not all(
            self.is_dense(config, layer)
            for layer in range(config.require("num_hidden_layers", int))
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        config = HFConfig(self.vllm_config.hf_config)
        first = config.require("num_hidden_layers", int)
        count = config.get("num_nextn_predict_layers", int, 0)
        further = tuple(
            f"{self.decoder_name}.layers.{layer}." for layer in range(first, first + count)
        )
        return super().load_weights(
            split_experts((name, x) for name, x in weights if not name.startswith(further))
        )
