"""DeepseekV2ForCausalLM, for checkpoints whose layers are all dense."""

from __future__ import annotations

import math

import torch
from toolkit_lm.attention import Attention
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import (
    ColumnParallelLinear,
    HFConfig,
    LinearMethod,
    ReplicatedLinear,
    RMSNorm,
    Rotation,
    RowParallelLinear,
    WrappingMethod,
    join,
    torch_dtype,
)
from toolkit_lm_decoder.llama import LlamaForCausalLM, LlamaModel
from toolkit_lm_rotary import RopeParameters, RotaryEmbedding
from torch import Tensor, nn

from toolkit_lm_mla.spec import LatentSpec

LATENT_EPS = 1e-6
"""Epsilon of the norms of latent vectors, which config.json does not state."""


def rope_of(config: HFConfig) -> RopeParameters:
    """How the rotated part of a head is rotated."""
    return RopeParameters.read(config, config.require("qk_rope_head_dim", int))


def scale_of(config: HFConfig) -> float:
    """Factor of scores: that of the head size. A stretched context may sharpen it."""
    rope = rope_of(config)
    size = config.require("qk_nope_head_dim", int) + rope.head_size
    sharpening = rope.values.get("mscale_all_dim", float)
    if rope.rope_type == "default" or not sharpening:
        return float(size**-0.5)
    growth = math.log(max(rope.values.require("factor", float), 1))
    return float(size**-0.5 * (0.1 * sharpening * growth + 1) ** 2)


class LatentAttention(Attention):
    """Attention with one vector per token, which all heads share: its key and its value."""

    def kv_cache_spec(self) -> LatentSpec:
        return LatentSpec(block_size=self.block_size, size=self.params.head_size, dtype=self.dtype)


class DeepseekV2Attention(nn.Module):
    """Multi-head latent attention: x [T, H] -> [T, H].

    A head's keys and values are its own two products of a latent vector. Here the first is taken of
    the query, and the second of the result: scores and sums are the same, and only latent vectors
    are read.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        hidden_size = config.require("hidden_size", int)
        num_heads = config.require("num_attention_heads", int)
        self.rank = config.require("kv_lora_rank", int)
        self.plain_size = config.require("qk_nope_head_dim", int)
        self.rotated_size = config.require("qk_rope_head_dim", int)
        self.value_size = config.require("v_head_dim", int)
        bias = config.get("attention_bias", bool, False)
        query_rank = config.get("q_lora_rank", int)
        query_size = num_heads * (self.plain_size + self.rotated_size)

        def column(inputs: int, outputs: int, name: str) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                inputs, outputs, vllm_config=vllm_config, prefix=join(prefix, name)
            )

        def replicated(outputs: int, name: str) -> ReplicatedLinear:
            return ReplicatedLinear(
                hidden_size, outputs, bias=bias, vllm_config=vllm_config, prefix=join(prefix, name)
            )

        self.has_query_rank = query_rank is not None
        if query_rank is None:
            self.q_proj = column(hidden_size, query_size, "q_proj")
        else:
            self.q_a_proj = replicated(query_rank, "q_a_proj")
            self.q_a_layernorm = RMSNorm(query_rank, eps=LATENT_EPS, vllm_config=vllm_config)
            self.q_b_proj = column(query_rank, query_size, "q_b_proj")
        self.kv_a_proj_with_mqa = replicated(self.rank + self.rotated_size, "kv_a_proj_with_mqa")
        self.kv_a_layernorm = RMSNorm(self.rank, eps=LATENT_EPS, vllm_config=vllm_config)
        self.kv_b_proj = column(
            self.rank, num_heads * (self.plain_size + self.value_size), "kv_b_proj"
        )
        self.o_proj = RowParallelLinear(
            num_heads * self.value_size,
            hidden_size,
            bias=bias,
            vllm_config=vllm_config,
            prefix=join(prefix, "o_proj"),
        )
        self.num_heads = self.kv_b_proj.output_size // (self.plain_size + self.value_size)
        self.attn = LatentAttention(
            self.num_heads,
            self.rank + self.rotated_size,
            num_kv_heads=1,
            scale=scale_of(config),
            vllm_config=vllm_config,
            prefix=join(prefix, "attn"),
        )
        self.dtype = torch_dtype(vllm_config.model.dtype)
        self.shown: tuple[LinearMethod, Tensor] | None = None

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        into_keys, into_values = self.products()
        q = self.queries(x).view(len(x), self.num_heads, -1)
        plain, rotated = q.split([self.plain_size, self.rotated_size], dim=-1)
        latent, key = self.kv_a_proj_with_mqa(x).split([self.rank, self.rotated_size], dim=-1)
        rotated = rotation.rotate(rotated.contiguous())
        key = rotation.rotate(key[:, None].contiguous())[:, 0]
        kept = torch.cat([self.kv_a_layernorm(latent.contiguous()), key], dim=-1)
        q = torch.cat([torch.einsum("thd,hdr->thr", plain, into_keys), rotated], dim=-1)
        found = self.attn(q.flatten(1), kept, kept).view(q.shape)[..., : self.rank]
        values = torch.einsum("thr,hdr->thd", found, into_values)
        out: Tensor = self.o_proj(values.flatten(1))
        return out

    def queries(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, heads * head size]."""
        q: Tensor = (
            self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
            if self.has_query_rank
            else self.q_proj(x)
        )
        return q

    def products(self) -> tuple[Tensor, Tensor]:
        """Each head's matrices to keys and to values, [heads, size, rank] each."""
        method = self.kv_b_proj.method
        if self.shown is None or self.shown[0] is not method:
            if isinstance(method, WrappingMethod):
                raise UnsupportedError(
                    f"layer {self.kv_b_proj.prefix!r} cannot be wrapped by "
                    f"{type(method).__name__}: its weight is multiplied by head."
                )
            weight = method.dequantized().to(self.dtype).view(self.num_heads, -1, self.rank)
            self.shown = method, weight
        keys, values = self.shown[1].split([self.plain_size, self.value_size], dim=1)
        return keys, values


class DeepseekV2Model(LlamaModel):
    """Only parts of heads are rotated, and pairs are neighbouring dimensions."""

    def _rotary(self, config: HFConfig) -> RotaryEmbedding:
        return RotaryEmbedding(rope_of(config), interleaved=True, vllm_config=self.vllm_config)


class DeepseekV2ForCausalLM(LlamaForCausalLM):
    """DeepSeek-V2 with its language-modeling head."""

    packed = {"gate_up_proj": ("gate_proj", "up_proj")}
    attention = DeepseekV2Attention
    decoder = DeepseekV2Model

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = HFConfig(vllm_config.hf_config)
        dense = config.get("first_k_dense_replace", int, 0)
        if dense < config.require("num_hidden_layers", int):
            raise UnsupportedError(
                f"config.json: after 'first_k_dense_replace' ({dense}) layers there are experts, "
                "and this plugin has dense layers only."
            )
        super().__init__(vllm_config=vllm_config, prefix=prefix)
