"""Mistral: Llama whose tokens see a window."""

from __future__ import annotations

from llm_toolkit.model import HFConfig

from llm_toolkit_decoder.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel


class MistralAttention(LlamaAttention):
    def window(self, config: HFConfig, layer: int) -> int | None:
        return config.get("sliding_window", int)


class MistralDecoderLayer(LlamaDecoderLayer):
    attention = MistralAttention


class MistralModel(LlamaModel):
    layer = MistralDecoderLayer


class MistralForCausalLM(LlamaForCausalLM):
    decoder = MistralModel
