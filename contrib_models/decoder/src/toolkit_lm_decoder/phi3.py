"""Phi-3 and Phi-4: Mistral whose checkpoints hold queries, keys and values, and gates and inputs,
in one tensor each."""

from __future__ import annotations

from toolkit_lm_decoder.mistral import MistralForCausalLM


class Phi3ForCausalLM(MistralForCausalLM):
    packed = {}
