"""Mistral: Llama whose tokens see a window."""

from __future__ import annotations

from toolkit_lm.model import HFConfig

from toolkit_lm_decoder.llama import LlamaAttention, LlamaForCausalLM


class MistralAttention(LlamaAttention):
    def window(self, config: HFConfig, layer: int) -> int | None:
        return config.get("sliding_window", int)


class MistralForCausalLM(LlamaForCausalLM):
    attention = MistralAttention
