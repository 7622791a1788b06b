"""Nemotron-H and Nemotron 3: layers of Mamba-2, attention, a feed-forward or experts, one each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import (
    ColumnParallelLinear,
    HFConfig,
    ReplicatedLinear,
    RowParallelLinear,
    get_activation,
    join,
)
from toolkit_lm_decoder.llama import LlamaAttention
from toolkit_lm_moe.experts import RoutedExperts, split_experts
from toolkit_lm_moe.routing import Router, Routing, num_experts_of
from torch import Tensor, nn

from toolkit_lm_hybrid.hybrid import with_values
from toolkit_lm_hybrid.mamba2 import Mamba2Mixer, Mamba2Shape
from toolkit_lm_hybrid.mixer_layer import RecurrentForCausalLM

KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letters of `hybrid_override_pattern`."""
OLDER_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
"""Kinds of layers as checkpoints named them before transformers 5."""


class NemotronMamba2Mixer(Mamba2Mixer):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        config = HFConfig(vllm_config.hf_config)
        activation = config.get("mamba_hidden_act", str, "silu")
        super().__init__(vllm_config=with_values(vllm_config, hidden_act=activation), prefix=prefix)

    def shape(self, config: HFConfig) -> Mamba2Shape:
        heads = config.get("mamba_num_heads", int, 128)
        return Mamba2Shape(
            inner_size=heads * config.get("mamba_head_dim", int, 64),
            heads=heads,
            groups=config.get("n_groups", int, 8),
            state_size=config.get("ssm_state_size", int, 128),
            kernel_size=config.get("conv_kernel", int, 4),
            conv_bias=config.get("use_conv_bias", bool, True),
            bias=config.get("use_bias", bool, False),
            eps=config.get("layer_norm_epsilon", float, 1e-5),
        )


class PlainMLP(nn.Module):
    """Feed-forward without a gate, of `mlp_hidden_act`: x [T, H] -> [T, H]."""

    size_key = "intermediate_size"

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        hidden_size = config.require("hidden_size", int)
        inner_size = config.require(self.size_key, int)
        options: dict[str, Any] = {
            "bias": config.get("mlp_bias", bool, False),
            "vllm_config": vllm_config,
        }
        self.up_proj = ColumnParallelLinear(
            hidden_size, inner_size, prefix=join(prefix, "up_proj"), **options
        )
        self.down_proj = RowParallelLinear(
            inner_size, hidden_size, prefix=join(prefix, "down_proj"), **options
        )
        self.activation = get_activation(config.get("mlp_hidden_act", str, "relu2"))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`residual` [T, H] is added."""
        out: Tensor = self.down_proj(self.activation(self.up_proj(x)), residual)
        return out


class SharedMLP(PlainMLP):
    size_key = "moe_shared_expert_intermediate_size"


class LatentMoE(nn.Module):
    """Experts without gates, routed as in DeepSeek-V3, and a shared one: x [T, H] -> [T, H]. With
    `moe_latent_size` the routed ones compute in fewer dimensions."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        hidden_size = config.require("hidden_size", int)
        count = num_experts_of(config)
        latent_size = config.get("moe_latent_size", int)
        self.routing = Routing.read(
            config, normalize=config.get("norm_topk_prob", bool, True), best=2
        )
        self.gate = Router(count, softmax=False, corrected=True, vllm_config=vllm_config)
        self.experts = RoutedExperts(
            count,
            hidden_size if latent_size is None else latent_size,
            config.require("moe_intermediate_size", int),
            activation=config.get("mlp_hidden_act", str, "relu2"),
            gated=False,
            vllm_config=vllm_config,
            prefix=join(prefix, "experts"),
        )
        self.shared_experts = SharedMLP(
            vllm_config=vllm_config, prefix=join(prefix, "shared_experts")
        )
        self.is_latent = latent_size is not None
        if latent_size is not None:
            options: dict[str, Any] = {
                "bias": config.get("mlp_bias", bool, False),
                "vllm_config": vllm_config,
            }
            self.fc1_latent_proj = ReplicatedLinear(
                hidden_size, latent_size, prefix=join(prefix, "fc1_latent_proj"), **options
            )
            self.fc2_latent_proj = ReplicatedLinear(
                latent_size, hidden_size, prefix=join(prefix, "fc2_latent_proj"), **options
            )

    def forward(self, x: Tensor) -> Tensor:
        experts, weights = self.routing.choose(self.gate(x), self.gate.e_score_correction_bias)
        inner = self.fc1_latent_proj(x) if self.is_latent else x
        out: Tensor = self.experts(inner, experts, weights)
        if self.is_latent:
            out = self.fc2_latent_proj(out)
        summed: Tensor = self.shared_experts(x, out)
        return summed


class NemotronHForCausalLM(RecurrentForCausalLM):
    packed = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
    renames: ClassVar[Sequence[tuple[str, str]]] = (
        *RecurrentForCausalLM.renames,
        (r"\.experts\.(\d+)\.up_proj\.", r".experts.\1.gate_up_proj."),
    )
    mixers = {
        "linear_attention": {"mixer": NemotronMamba2Mixer},
        "full_attention": {"self_attn": LlamaAttention},
        "mlp": {"mixer": PlainMLP},
        "moe": {"mixer": LatentMoE},
    }

    @classmethod
    def values(cls, config: HFConfig) -> dict[str, Any]:
        return {
            **super().values(config),
            "num_hidden_layers": len(cls.layer_kinds(config)),
            "head_dim": config.get("head_dim", int, 128),
            # Attention has none, whatever is stated.
            "attention_bias": False,
        }

    @classmethod
    def layer_kinds(cls, config: HFConfig) -> list[str]:
        for key in ("layers_block_type", "layer_types"):
            if (kinds := config.get(key, list)) is not None:
                return [OLDER_NAMES.get(str(kind), str(kind)) for kind in kinds]
        letters = config.require("hybrid_override_pattern", str)
        if unknown := sorted({*letters} - {*KINDS}):
            raise CheckpointError(
                f"config.json: 'hybrid_override_pattern' has {unknown[0]!r}; known are "
                f"{', '.join(KINDS)}."
            )
        return [KINDS[letter] for letter in letters]

    def divides_experts(self) -> bool:
        return "moe" in self.layer_kinds(HFConfig(self.vllm_config.hf_config))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        kept = ((name, x) for name, x in weights if not name.startswith("mtp."))
        return super().load_weights(split_experts(kept))
