"""LFM2: gated short convolutions with attention in some layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import HFConfig, MergedColumnParallelLinear, RowParallelLinear, Shard, join
from toolkit_lm_decoder.qwen3 import Qwen3Attention
from torch import Tensor

from toolkit_lm_hybrid.hybrid import HybridForCausalLM
from toolkit_lm_hybrid.mixer import CausalConv, RecurrentMixer, convolved


class ShortConv(RecurrentMixer):
    """x [T, H] -> [T, H]: C * conv(B * x), with B, C and x projected."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(prefix)
        config = HFConfig(vllm_config.hf_config)
        size = config.require("hidden_size", int)
        bias = config.get("conv_bias", bool, False)
        options: dict[str, Any] = {"bias": bias, "vllm_config": vllm_config}
        self.in_proj = MergedColumnParallelLinear(
            size, [size] * 3, prefix=join(prefix, "in_proj"), **options
        )
        channels = Shard.even(size, vllm_config.parallel, f"channels of {prefix}")
        self.conv = CausalConv([channels], config.get("conv_L_cache", int, 3), **options)
        self.out_proj = RowParallelLinear(size, size, prefix=join(prefix, "out_proj"), **options)
        self.keep_states(self.conv.state_shape, vllm_config=vllm_config)

    def forward(self, x: Tensor) -> Tensor:
        b, c, x = self.in_proj(x).chunk(3, dim=-1)
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        self.run((b * x).contiguous(), out=out)
        result: Tensor = self.out_proj((c * out).to(x.dtype))
        return result

    def compute(self, *inputs: Tensor, out: Tensor) -> None:
        out.copy_(convolved(self.conv, inputs[0], [*self.steps()]))


def lfm_values(config: HFConfig) -> dict[str, Any]:
    """Fields of config.json that all LFM name otherwise than Llama."""
    tied = config.get("tie_embedding", bool, config.get("tie_word_embeddings", bool, True))
    return {"rms_norm_eps": config.get("norm_eps", float, 1e-5), "tie_word_embeddings": tied}


class Lfm2Attention(Qwen3Attention):
    def window(self, config: HFConfig, layer: int) -> None:
        return None


class Lfm2ForCausalLM(HybridForCausalLM):
    packed = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("w1", "w3"),
        "down_proj": ("w2",),
    }
    renames: ClassVar[Sequence[tuple[str, str]]] = (
        (r"\.operator_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.feed_forward\.", ".mlp."),
        (r"\.embedding_norm\.", ".norm."),
        (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.([qk])_layernorm\.", r".\1_norm."),
    )
    mixers = {"conv": {"conv": ShortConv}, "full_attention": {"self_attn": Lfm2Attention}}

    @classmethod
    def values(cls, config: HFConfig) -> dict[str, Any]:
        return {**lfm_values(config), "intermediate_size": cls.inner_size(config)}

    @classmethod
    def inner_size(cls, config: HFConfig) -> int:
        """Inner dimensions of the feed-forward."""
        size = config.get("block_ff_dim", int) or config.require("intermediate_size", int)
        if config.get("block_auto_adjust_ff_dim", bool, True):
            size = int(config.get("block_ffn_dim_multiplier", float, 1.0) * int(2 * size / 3))
            multiple = config.get("block_multiple_of", int, 256)
            size = -(-size // multiple) * multiple
        return size

    @classmethod
    def layer_kinds(cls, config: HFConfig) -> list[str]:
        if (kinds := config.get("layer_types", list)) is not None:
            return kinds
        count = config.require("num_hidden_layers", int)
        attention = config.get("full_attn_idxs", list, [*range(count)])
        return ["full_attention" if i in attention else "conv" for i in range(count)]
