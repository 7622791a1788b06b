"""Gemma 2: norms before and after attention and feed-forward, soft caps, and windows in every other
layer."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import (
    HFConfig,
    LayerParts,
    RMSNorm,
    Rotation,
    Shard,
    ShardLoader,
    choose_kernels,
    new_parameter,
    torch_dtype,
)
from torch import Tensor

from toolkit_lm_decoder.llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
    layer_window,
)


def _load_plus_one(param: Tensor, loaded: Tensor, shard_id: int | None = None) -> None:
    ShardLoader((Shard.whole(len(param)),))(param, loaded, shard_id)
    param.data += 1


class GemmaRMSNorm(RMSNorm):
    """RMSNorm by 1 + weight, all in float32: next to 1, bfloat16 would round the weight away."""

    def __init__(self, size: int, *, eps: float, vllm_config: VllmConfig) -> None:
        super().__init__(size, eps=eps, vllm_config=vllm_config)
        self.weight = new_parameter((size,), torch.float32, _load_plus_one)


def is_bidirectional(config: HFConfig) -> bool:
    """Whether the checkpoint is an encoder."""
    return config.get("use_bidirectional_attention", bool, False)


class Gemma2Attention(LlamaAttention):
    def scale(self, config: HFConfig) -> float:
        return 1 / math.sqrt(config.get("query_pre_attn_scalar", float, 256.0))

    def soft_cap(self, config: HFConfig) -> float | None:
        return config.get("attn_logit_softcapping", float)

    def window(self, config: HFConfig, layer: int) -> int | None:
        if is_bidirectional(config):
            raise UnsupportedError(
                "config.json: 'use_bidirectional_attention' makes this model an encoder. Only "
                "decoders can be run."
            )
        return layer_window(config, layer, otherwise=self.is_windowed(config, layer))

    def is_windowed(self, config: HFConfig, layer: int) -> bool:
        """Whether a layer has a window where config.json states no `layer_types`."""
        return layer % 2 == 0


class GemmaMLP(LlamaMLP):
    def activation(self, config: HFConfig) -> str:
        return config.get("hidden_activation", str, "gelu_pytorch_tanh")


class Gemma2DecoderLayer(LlamaDecoderLayer):
    seams = LlamaDecoderLayer.seams
    norms: ClassVar[tuple[str, ...]] = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    pre_feedforward_layernorm: RMSNorm
    post_feedforward_layernorm: RMSNorm

    def parts(self) -> LayerParts | None:
        return self.parts_of(
            input_norm=self.input_layernorm,
            post_norm=self.pre_feedforward_layernorm,
            out_norms=(self.post_attention_layernorm, self.post_feedforward_layernorm),
        )

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.enter(x, residual)
        x = self.post_attention_layernorm(self.self_attn(x, rotation))
        x, residual = self.pre_feedforward_layernorm(x, residual)
        return self.post_feedforward_layernorm(self.mlp(x)), residual


class Gemma2Model(LlamaModel):
    is_tied_by_default = True

    def embedding_scale(self, config: HFConfig) -> float:
        # The model was trained with a factor that is rounded to its dtype.
        dtype = torch_dtype(self.vllm_config.model.dtype)
        return float(
            torch.tensor(math.sqrt(config.require("hidden_size", int)), dtype=dtype, device="cpu")
        )


class CappedForCausalLM(LlamaForCausalLM):
    """A decoder whose logits pass a soft cap, where config.json states one."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.soft_cap = HFConfig(vllm_config.hf_config).get("final_logit_softcapping", float)
        self.kernels = choose_kernels()

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        logits = super().compute_logits(hidden_states)
        return logits if self.soft_cap is None else self.kernels.soft_cap(logits, self.soft_cap)

    def likeliest(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        # A cap makes different logits equal.
        own = getattr(self.compute_logits, "__func__", None)
        if self.soft_cap is None and own is CappedForCausalLM.compute_logits:
            head: Any = self.lm_head
            found: tuple[Tensor, Tensor] = head.likeliest(hidden_states)
            return found
        return super().likeliest(hidden_states)


class Gemma2ForCausalLM(CappedForCausalLM):
    attention = Gemma2Attention
    feed_forward = GemmaMLP
    norm = GemmaRMSNorm
    layer = Gemma2DecoderLayer
    decoder = Gemma2Model
