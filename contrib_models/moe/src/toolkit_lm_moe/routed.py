"""Base of families with routed experts: the block that replaces the feed-forward one, and the
loading of its weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import HFConfig, ReplicatedLinear, join
from toolkit_lm_decoder.llama import LlamaForCausalLM
from torch import Tensor, nn

from toolkit_lm_moe.experts import GatedUnit, RoutedExperts, route_top_k, split_experts

_MOST_EXPERTS = 2**12


def num_experts_of(config: HFConfig) -> int:
    """`num_local_experts`, or `num_experts`: a family's checkpoints may state either."""
    stated = config.get("num_local_experts", int)
    count = stated if stated is not None else config.require("num_experts", int)
    if not 0 <= count <= _MOST_EXPERTS:
        raise CheckpointError(
            f"config.json: 'num_experts' must be 0 to {_MOST_EXPERTS}, not {count}."
        )
    return count


class RoutedBlock(nn.Module):
    """Routed experts: x [T, H] -> [T, H]."""

    has_bias: ClassVar[bool] = False
    """Whether the router and the experts have biases."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        hidden_size = config.require("hidden_size", int)
        num_experts = num_experts_of(config)
        self.top_k = config.require("num_experts_per_tok", int)
        if not 1 <= self.top_k <= num_experts:
            raise CheckpointError(
                f"config.json: 'num_experts_per_tok' must be 1 to {num_experts} (the experts), "
                f"not {self.top_k}."
            )
        self.normalize = self.normalizes(config)
        self.gate = ReplicatedLinear(
            hidden_size,
            num_experts,
            bias=self.has_bias,
            vllm_config=vllm_config,
            prefix=join(prefix, "gate"),
        )
        self.experts = RoutedExperts(
            num_experts,
            hidden_size,
            self.inner_size(config),
            activation=self.activation(config),
            unit=self.unit(config),
            bias=self.has_bias,
            vllm_config=vllm_config,
            prefix=join(prefix, "experts"),
        )

    def inner_size(self, config: HFConfig) -> int:
        """Inner dimensions of one expert."""
        return config.require("intermediate_size", int)

    def normalizes(self, config: HFConfig) -> bool:
        """Whether the weights of a token's experts sum to one."""
        return True

    def activation(self, config: HFConfig) -> str:
        """A name that `gate` accepts."""
        return config.get("hidden_act", str, "silu")

    def unit(self, config: HFConfig) -> GatedUnit | None:
        """The unit that an expert makes of gate and up. None: its activation."""
        return None

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The router's logits [T, E] -> experts [T, K] (int64), and their weights [T, K]
        (float32)."""
        return route_top_k(logits, self.top_k, normalize=self.normalize)

    def forward(self, x: Tensor) -> Tensor:
        experts, weights = self.route(self.gate(x))
        out: Tensor = self.experts(x, experts, weights)
        return out


class RoutedForCausalLM(LlamaForCausalLM):
    """A decoder with routed experts and its language-modeling head."""

    def divides_experts(self) -> bool:
        return True

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(split_experts(weights))
