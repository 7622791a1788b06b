"""Qwen3.5 (text) with experts in each layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import nn

from toolkit_lm_hybrid.qwen3_5 import Qwen3_5ForCausalLM
from toolkit_lm_hybrid.qwen3_next import SharedExpertBlock


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):  # noqa: N801
    feed_forward: ClassVar[Callable[..., nn.Module]] = SharedExpertBlock
