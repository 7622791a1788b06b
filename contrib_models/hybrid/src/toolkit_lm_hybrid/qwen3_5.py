"""Qwen3.5 (text), dense: Qwen3-Next with projections that are apart, and no experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from toolkit_lm_decoder.llama import LlamaMLP
from torch import nn

from toolkit_lm_hybrid.gated_attention import GatedAttention
from toolkit_lm_hybrid.gated_delta import GatedDeltaNet
from toolkit_lm_hybrid.qwen3_next import Qwen3NextForCausalLM


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):  # noqa: N801
    packed = {**Qwen3NextForCausalLM.packed, "in_proj_ba": ("in_proj_b", "in_proj_a")}
    mixers = {
        "linear_attention": {"linear_attn": GatedDeltaNet},
        "full_attention": {"self_attn": GatedAttention},
    }
    feed_forward: ClassVar[Callable[..., nn.Module]] = LlamaMLP
