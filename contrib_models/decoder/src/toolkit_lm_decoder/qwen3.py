"""Qwen3: Llama that norms the queries and keys of each head."""

from __future__ import annotations

from typing import ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.model import HFConfig, RMSNorm

from toolkit_lm_decoder.llama import LlamaAttention, LlamaForCausalLM, eps_of
from toolkit_lm_decoder.qwen2 import qwen_window


class Qwen3Attention(LlamaAttention):
    norm: ClassVar[type[RMSNorm]] = RMSNorm

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        eps = eps_of(HFConfig(vllm_config.hf_config))
        self.q_norm = self.norm(self.head_size, eps=eps, vllm_config=vllm_config)
        self.k_norm = self.norm(self.head_size, eps=eps, vllm_config=vllm_config)

    def window(self, config: HFConfig, layer: int) -> int | None:
        return qwen_window(config, layer)

    def head_norms(self) -> tuple[RMSNorm, RMSNorm]:
        return self.q_norm, self.k_norm


class Qwen3ForCausalLM(LlamaForCausalLM):
    attention = Qwen3Attention
