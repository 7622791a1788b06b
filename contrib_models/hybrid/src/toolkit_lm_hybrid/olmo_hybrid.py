"""OLMo Hybrid: gated delta nets, and attention as in OLMo 2 in every fourth layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.model import HFConfig, layer_index
from toolkit_lm_decoder.olmo2 import Olmo2Attention, Olmo2DecoderLayer
from torch import Tensor, nn

from toolkit_lm_hybrid.gated_delta import GatedDeltaNet
from toolkit_lm_hybrid.hybrid import (
    HybridForCausalLM,
    HybridLayer,
    HybridModel,
    HybridParts,
    layer_kind,
)
from toolkit_lm_hybrid.mixer import joined_convolutions


class OlmoGatedDeltaNet(GatedDeltaNet):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        negative = HFConfig(vllm_config.hf_config).get("linear_allow_neg_eigval", bool, True)
        self.beta_scale = 2.0 if negative else 1.0

    def norm_eps(self, config: HFConfig) -> float:
        # The value of the kernels that the model was trained with, whatever is stated.
        return 1e-5


def olmo_layer(parts: type[HybridParts], *, vllm_config: VllmConfig, prefix: str) -> nn.Module:
    """A layer: norms go before a recurrence and its feed-forward, and after attention and its
    own."""
    kind = layer_kind(parts, HFConfig(vllm_config.hf_config), layer_index(prefix))
    if kind == "full_attention":
        return Olmo2DecoderLayer(parts, vllm_config=vllm_config, prefix=prefix)
    return HybridLayer(parts, vllm_config=vllm_config, prefix=prefix)


class OlmoHybridModel(HybridModel):
    def rotates(self, config: HFConfig) -> bool:
        """False where config.json states a `rope_theta` of null."""
        stated = {**config.values, **config.get("rope_parameters", dict, {})}
        return stated.get("rope_theta", True) is not None


class OlmoHybridForCausalLM(HybridForCausalLM):
    packed = {
        **HybridForCausalLM.packed,
        "in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"),
        "in_proj_ba": ("b_proj", "a_proj"),
    }
    renames = (
        (r"\.linear_attn\.([qkv])_proj\.", r".linear_attn.in_proj_\1."),
        (r"\.linear_attn\.g_proj\.", ".linear_attn.in_proj_z."),
        (r"\.linear_attn\.o_proj\.", ".linear_attn.out_proj."),
        (r"\.linear_attn\.o_norm\.", ".linear_attn.norm."),
        (r"\.attention_layer_norm\.", ".input_layernorm."),
        (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
    )
    mixers = {
        "linear_attention": {"linear_attn": OlmoGatedDeltaNet},
        "full_attention": {"self_attn": Olmo2Attention},
    }
    attention = Olmo2Attention
    layer: ClassVar[Any] = staticmethod(olmo_layer)
    decoder = OlmoHybridModel

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(joined_convolutions(weights))

    @classmethod
    def values(cls, config: HFConfig) -> dict[str, Any]:
        heads = config.require("num_attention_heads", int)
        key_heads = config.get("linear_num_key_heads", int, heads)
        size = int(0.75 * config.require("hidden_size", int) / key_heads)
        size = config.get("linear_key_head_dim", int, size)
        return {
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": config.get("linear_num_value_heads", int, heads),
            "linear_key_head_dim": size,
            "linear_value_head_dim": config.get("linear_value_head_dim", int, 2 * size),
            "layer_types": cls.layer_kinds(config),
        }

    @classmethod
    def layer_kinds(cls, config: HFConfig) -> list[str]:
        if (kinds := config.get("layer_types", list)) is not None:
            return kinds
        count = config.require("num_hidden_layers", int)
        kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(count)]
        return kinds if "full_attention" in kinds else [*kinds[:-1], "full_attention"]
