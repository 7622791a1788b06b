"""Mixtral: Mistral with routed experts in each layer."""

from __future__ import annotations

from toolkit_lm_decoder.mistral import MistralAttention

from toolkit_lm_moe.routed import RoutedBlock, RoutedForCausalLM


class MixtralForCausalLM(RoutedForCausalLM):
    packed = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("w1", "w3"),
        "down_proj": ("w2",),
    }
    renames = ((r"\.block_sparse_moe\.", ".mlp."),)
    attention = MistralAttention
    feed_forward = RoutedBlock
