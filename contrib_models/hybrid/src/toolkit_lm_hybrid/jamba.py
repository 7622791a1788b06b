"""Jamba: Mamba with attention in some layers and experts in some."""

from __future__ import annotations

from collections.abc import Iterable

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import HFConfig, RMSNorm, layer_index
from toolkit_lm_decoder.llama import LlamaAttention, LlamaMLP
from toolkit_lm_moe.experts import split_experts
from toolkit_lm_moe.routed import RoutedBlock, num_experts_of
from torch import Tensor, nn

from toolkit_lm_hybrid.hybrid import HybridForCausalLM
from toolkit_lm_hybrid.mamba import MambaMixer, MambaShape, rank_of
from toolkit_lm_hybrid.mixer_layer import UnrotatedModel


class JambaMixer(MambaMixer):
    """Time steps, B and C are normed."""

    def shape(self, config: HFConfig) -> MambaShape:
        return MambaShape(
            inner_size=config.get("mamba_expand", int, 2) * config.require("hidden_size", int),
            state_size=config.get("mamba_d_state", int, 16),
            kernel_size=config.get("mamba_d_conv", int, 4),
            rank=rank_of(config, "mamba_dt_rank"),
            conv_bias=config.get("mamba_conv_bias", bool, True),
            bias=config.get("mamba_proj_bias", bool, False),
        )

    def add_norms(self, config: HFConfig, shape: MambaShape, vllm_config: VllmConfig) -> None:
        eps = config.get("rms_norm_eps", float, 1e-6)
        sizes = {"dt": shape.rank, "b": shape.state_size, "c": shape.state_size}
        for name, size in sizes.items():
            norm: nn.Module = RMSNorm(size, eps=eps, vllm_config=vllm_config)
            self.add_module(f"{name}_layernorm", norm)

    def normed(self, step: Tensor, into: Tensor, out_of: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            self.get_submodule(f"{name}_layernorm")(x.contiguous())
            for name, x in (("dt", step), ("b", into), ("c", out_of))
        )


class JambaBlock(RoutedBlock):
    def normalizes(self, config: HFConfig) -> bool:
        return False


class JambaForCausalLM(HybridForCausalLM):
    mixers = {
        "linear_attention": {"mamba": JambaMixer},
        "full_attention": {"self_attn": LlamaAttention},
    }
    renames = (
        (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
        (r"\.feed_forward\.router\.", ".mlp.gate."),
        (r"\.feed_forward\.", ".mlp."),
        (r"^model\.final_layernorm\.", "model.norm."),
    )
    decoder = UnrotatedModel

    @classmethod
    def layer_kinds(cls, config: HFConfig) -> list[str]:
        return [
            "full_attention" if is_its_turn(config, "attn", layer) else "linear_attention"
            for layer in range(config.require("num_hidden_layers", int))
        ]

    @classmethod
    def has_experts(cls, config: HFConfig, layer: int) -> bool:
        return num_experts_of(config) > 1 and is_its_turn(config, "expert", layer)

    @classmethod
    def feed_forward(cls, *, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        routed = cls.has_experts(HFConfig(vllm_config.hf_config), layer_index(prefix))
        return (JambaBlock if routed else LlamaMLP)(vllm_config=vllm_config, prefix=prefix)

    def divides_experts(self) -> bool:
        config = HFConfig(self.vllm_config.hf_config)
        layers = range(config.require("num_hidden_layers", int))
        return any(self.has_experts(config, layer) for layer in layers)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(split_experts(weights))


def is_its_turn(config: HFConfig, kind: str, layer: int) -> bool:
    """Whether a layer has attention (`kind` "attn") or experts ("expert"): one of each period."""
    default = (8, 4) if kind == "attn" else (2, 1)
    period = config.get(f"{kind}_layer_period", int, default[0])
    offset = config.get(f"{kind}_layer_offset", int, default[1])
    if not 0 <= offset < period:
        raise CheckpointError(
            f"config.json: '{kind}_layer_offset' must be 0 to {period - 1} (below "
            f"'{kind}_layer_period'), not {offset}."
        )
    return layer % period == offset
