"""Qwen2: Llama with biases in the projections to queries, keys and values, and windows in the upper
layers."""

from __future__ import annotations

from toolkit_lm.model import HFConfig

from toolkit_lm_decoder.llama import LlamaAttention, LlamaForCausalLM, layer_window


def qwen_window(config: HFConfig, layer: int) -> int | None:
    """The window of a layer: of those from `max_window_layers` on, where `use_sliding_window` is
    on."""
    if not config.get("use_sliding_window", bool, False):
        return None
    return layer_window(config, layer, otherwise=layer >= config.get("max_window_layers", int, 28))


class Qwen2Attention(LlamaAttention):
    def has_qkv_bias(self, config: HFConfig) -> bool:
        return True

    def has_output_bias(self, config: HFConfig) -> bool:
        return False

    def window(self, config: HFConfig, layer: int) -> int | None:
        return qwen_window(config, layer)


class Qwen2ForCausalLM(LlamaForCausalLM):
    attention = Qwen2Attention


class MiMoForCausalLM(Qwen2ForCausalLM):
    """MiMo-7B. Its heads for further tokens are left out."""

    ignored = (r"rotary_emb\.inv_freq$|^model\.mtp_layers\.",)
