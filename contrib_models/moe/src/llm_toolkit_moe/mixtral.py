"""Mixtral: Mistral with routed experts in each layer."""

from __future__ import annotations

from llm_toolkit_decoder.llama import LlamaModel
from llm_toolkit_decoder.mistral import MistralDecoderLayer

from llm_toolkit_moe.routed import RoutedBlock, RoutedForCausalLM


class MixtralDecoderLayer(MistralDecoderLayer):
    feed_forward = RoutedBlock


class MixtralModel(LlamaModel):
    layer = MixtralDecoderLayer


class MixtralForCausalLM(RoutedForCausalLM):
    packed = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
    renames = ((r"\.block_sparse_moe\.", ".mlp."),)
    decoder = MixtralModel
