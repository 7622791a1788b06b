"""Bamba: Mamba-2 with attention in some layers."""

from __future__ import annotations

from toolkit_lm.model import HFConfig
from toolkit_lm_decoder.llama import LlamaAttention

from toolkit_lm_hybrid.hybrid import HybridForCausalLM
from toolkit_lm_hybrid.mamba2 import Mamba2Mixer


class BambaForCausalLM(HybridForCausalLM):
    renames = (
        (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
        (r"\.feed_forward\.", ".mlp."),
        (r"\.final_layernorm\.", ".norm."),
    )
    mixers = {
        "linear_attention": {"mamba": Mamba2Mixer},
        "full_attention": {"self_attn": LlamaAttention},
    }
    partial_rotary_factor = 0.5

    @classmethod
    def layer_kinds(cls, config: HFConfig) -> list[str]:
        attention = config.get("attn_layer_indices", list, [])
        count = config.require("num_hidden_layers", int)
        return ["full_attention" if i in attention else "linear_attention" for i in range(count)]
