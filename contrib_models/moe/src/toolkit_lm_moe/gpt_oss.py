"""gpt-oss: attention with sinks, windows in every other layer, experts with biases and a clamped
SwiGLU. Its checkpoints hold MXFP4, or floats."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import HFConfig, Shard, ShardLoader, new_parameter, torch_dtype
from toolkit_lm_decoder.llama import LlamaAttention, LlamaForCausalLM, layer_window
from torch import Tensor, nn

from toolkit_lm_moe.experts import GatedUnit
from toolkit_lm_moe.routed import RoutedBlock, RoutedForCausalLM

_STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias)?")
_ALPHA = 1.702
_LIMIT = 7.0
"""Of all checkpoints that are known: kernels compute the clamped SwiGLU with these."""
_GATE_UP = re.compile(r"(.*\.experts\.\d+)\.gate_up_proj\.(\w+)")


class GptOssAttention(LlamaAttention):
    def has_qkv_bias(self, config: HFConfig) -> bool:
        return config.get("attention_bias", bool, True)

    def has_output_bias(self, config: HFConfig) -> bool:
        return config.get("attention_bias", bool, True)

    def window(self, config: HFConfig, layer: int) -> int | None:
        return layer_window(config, layer, otherwise=layer % 2 == 0)

    def sinks(self, vllm_config: VllmConfig) -> nn.Parameter:
        heads = HFConfig(vllm_config.hf_config).require("num_attention_heads", int)
        shard = Shard.even(heads, vllm_config.parallel, "attention heads")
        dtype = torch_dtype(vllm_config.model.dtype)
        return new_parameter((shard.size,), dtype, ShardLoader((shard,)))


def clamped_swiglu(x: Tensor, *, alpha: float, limit: float) -> Tensor:
    """Gate and up side by side [rows, 2 * inner] -> (up + 1) * gate * sigmoid(alpha * gate), both
    clamped to `limit`, the gate from above alone."""
    gate, up = x.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * (gate * torch.sigmoid(alpha * gate))


class GptOssBlock(RoutedBlock):
    has_bias = True

    def activation(self, config: HFConfig) -> str:
        return "clamped_swiglu"

    def unit(self, config: HFConfig) -> GatedUnit | None:
        found = config.get("swiglu_alpha", float, _ALPHA), config.get("swiglu_limit", float, _LIMIT)
        if found == (_ALPHA, _LIMIT):
            return None
        return partial(clamped_swiglu, alpha=found[0], limit=found[1])


def split_stacked(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Cuts the tensors of all experts, floats [E, inputs, outputs] and biases [E, outputs], in one
    per expert, and rows of gate and up, which alternate, into two tensors."""
    for name, tensor in weights:
        stacked = _STACKED.fullmatch(name)
        pieces = [(name, tensor)]
        if stacked is not None:
            prefix, projection, bias = stacked.groups()
            kind = "bias" if bias else "weight"
            pieces = [
                (f"{prefix}.{i}.{projection}.{kind}", expert if bias else expert.mT)
                for i, expert in enumerate(tensor)
            ]
        for own, piece in pieces:
            if (packed := _GATE_UP.fullmatch(own)) is None:
                yield own, piece
            else:
                yield f"{packed[1]}.gate_proj.{packed[2]}", piece[::2]
                yield f"{packed[1]}.up_proj.{packed[2]}", piece[1::2]


class GptOssForCausalLM(RoutedForCausalLM):
    renames = ((r"\.mlp\.router\.", ".mlp.gate."), (r"\.sinks$", ".attn.sinks"))
    attention = GptOssAttention
    feed_forward = GptOssBlock

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        # Not RoutedForCausalLM's, which takes stacked experts to be [E, outputs, inputs].
        return LlamaForCausalLM.load_weights(self, split_stacked(weights))
