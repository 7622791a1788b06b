"""Multi-head latent attention with its projections, and the rotation of its heads."""

from __future__ import annotations

import math

import torch
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
    Rows,
    WrappingMethod,
    choose_kernels,
    join,
    torch_dtype,
)
from toolkit_lm_decoder.dense import dense
from toolkit_lm_decoder.llama import LlamaModel
from toolkit_lm_hybrid.blocks import HeadProduct, by_head
from toolkit_lm_rotary import RopeParameters, RotaryEmbedding
from torch import Tensor, nn

from toolkit_lm_deepseek.latent import LatentAttention
from toolkit_lm_deepseek.params import Choice, IndexShape

LATENT_EPS = 1e-6
"""Epsilon of the norms of latent vectors, which config.json does not state."""


def rope_of(config: HFConfig) -> RopeParameters:
    """How the rotated part of a head is rotated."""
    return RopeParameters.read(config, config.require("qk_rope_head_dim", int))


def scale_of(config: HFConfig) -> float:
    """Factor of scores: head size ** -0.5. YaRN's `mscale_all_dim` sharpens a stretched context."""
    rope = rope_of(config)
    size = config.require("qk_nope_head_dim", int) + rope.head_size
    sharpening = rope.values.get("mscale_all_dim", float)
    if rope.rope_type == "default" or not sharpening:
        return float(size**-0.5)
    growth = math.log(max(rope.values.require("factor", float), 1))
    return float(size**-0.5 * (0.1 * sharpening * growth + 1) ** 2)


class DeepseekAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-AI 2024): x [T, H] -> [T, H].

    A token's keys and values of all heads are projections of one latent vector, kv_lora_rank long,
    and of qk_rope_head_dim rotated dimensions. These are cached, whole on each tensor parallel
    rank; heads are divided.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.vllm_config = vllm_config
        self.prefix = prefix
        config = HFConfig(vllm_config.hf_config)
        hidden_size = config.require("hidden_size", int)
        num_heads = config.require("num_attention_heads", int)
        self.rank = config.require("kv_lora_rank", int)
        self.plain_size = config.require("qk_nope_head_dim", int)
        self.rotated_size = config.require("qk_rope_head_dim", int)
        self.value_size = self.value_size_of(config)
        self.head_size = self.plain_size + self.rotated_size
        bias = config.get("attention_bias", bool, False)
        self.query_rank = config.get("q_lora_rank", int)
        if self.query_rank is None:
            self.q_proj = self._column(hidden_size, num_heads * self.head_size, "q_proj")
        else:
            self.q_a_proj = self._replicated(hidden_size, self.query_rank, "q_a_proj", bias=bias)
            self.q_a_layernorm = RMSNorm(self.query_rank, eps=LATENT_EPS, vllm_config=vllm_config)
            self.q_b_proj = self._column(self.query_rank, num_heads * self.head_size, "q_b_proj")
        self.kv_a_proj_with_mqa = self._replicated(
            hidden_size, self.rank + self.rotated_size, "kv_a_proj_with_mqa", bias=bias
        )
        self.kv_a_layernorm = RMSNorm(self.rank, eps=LATENT_EPS, vllm_config=vllm_config)
        self.kv_b_proj = self._column(
            self.rank, num_heads * (self.plain_size + self.value_size), "kv_b_proj"
        )
        self.kv_b_proj.rows = Rows.CACHED
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
            self.head_size,
            rank=self.rank,
            rotated_size=self.rotated_size,
            value_size=self.value_size,
            scale=scale_of(config),
            weights=self.weights,
            expand=self.expand,
            index=self.index_shape(config),
            choice=self.choice(config),
            vllm_config=vllm_config,
            prefix=join(prefix, "attn"),
        )
        self.dtype = torch_dtype(vllm_config.model.dtype)
        self.kernels = choose_kernels()
        self.shown: tuple[LinearMethod, tuple[HeadProduct, HeadProduct]] | None = None
        """A method of `kv_b_proj`, and products with the weight that it holds."""

    def value_size_of(self, config: HFConfig) -> int:
        return config.require("v_head_dim", int)

    def _column(self, inputs: int, outputs: int, name: str) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            inputs, outputs, vllm_config=self.vllm_config, prefix=join(self.prefix, name)
        )

    def _replicated(self, inputs: int, outputs: int, name: str, *, bias: bool) -> ReplicatedLinear:
        return ReplicatedLinear(
            inputs,
            outputs,
            bias=bias,
            vllm_config=self.vllm_config,
            prefix=join(self.prefix, name),
        )

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        inputs = self.query_inputs(x)
        q = self.queries(inputs).view(len(x), self.num_heads, self.head_size)
        plain, turned = torch.split(q, [self.plain_size, self.rotated_size], dim=-1)
        q = torch.cat([plain, rotation.rotate(dense(turned))], dim=-1)
        kept = self.kv_a_proj_with_mqa(x)
        latent, key = torch.split(kept, [self.rank, self.rotated_size], dim=-1)
        key = rotation.rotate(dense(key).unsqueeze(1)).squeeze(1)
        kept = torch.cat([self.latents(dense(latent)), key], dim=-1)
        out: Tensor = self.o_proj(self.attend(q, kept, x, inputs, rotation))
        return out

    def attend(
        self, q: Tensor, kept: Tensor, x: Tensor, inputs: Tensor, rotation: Rotation
    ) -> Tensor:
        """Queries and what is kept of each token -> [T, heads * value size]. `x`: the layer's
        input; `inputs`: that of queries."""
        out: Tensor = self.attn(q, kept)
        return out

    def query_inputs(self, x: Tensor) -> Tensor:
        """x [T, H] -> what queries are projections of: itself, or [T, query rank]."""
        if self.query_rank is None:
            return x
        made: Tensor = self.q_a_layernorm(self.q_a_proj(x))
        return made

    def queries(self, inputs: Tensor) -> Tensor:
        """-> [T, heads * head_size], a new tensor."""
        q: Tensor = (self.q_proj if self.query_rank is None else self.q_b_proj)(inputs)
        return q

    def index_shape(self, config: HFConfig) -> IndexShape | None:
        """Sizes of the layer's indexer. None: it has none."""
        return None

    def choice(self, config: HFConfig) -> Choice | None:
        """The place of an indexer's choice. None: there is no indexer."""
        return None

    def latents(self, x: Tensor) -> Tensor:
        """The normed latents [T, rank]."""
        normed: Tensor = self.kv_a_layernorm(x)
        return normed

    def expand(self, latents: Tensor) -> Tensor:
        """Latents [N, rank] -> plain keys, then values: [N, heads, plain size + value size]."""
        made = self._own_method().apply(latents, None)
        return made.view(len(latents), self.num_heads, -1)

    def weights(self) -> tuple[HeadProduct, HeadProduct]:
        """Products by head with the projections of latents to keys and to values. See
        LatentParams."""
        method = self._own_method()
        if self.shown is None or self.shown[0] is not method:
            weight = method.dequantized().to(self.dtype).view(self.num_heads, -1, self.rank)
            keys, values = torch.split(weight, [self.plain_size, self.value_size], dim=1)
            # Products of slices of a wider tensor are several times slower.
            made = (by_head(self.kernels, x) for x in (keys.contiguous().mT, values.contiguous()))
            self.shown = method, (next(made), next(made))
        return self.shown[1]

    def _own_method(self) -> LinearMethod:
        """The method of `kv_b_proj`. A wrapped one would change some tokens, and not others."""
        method = self.kv_b_proj.method
        if isinstance(method, WrappingMethod):
            raise UnsupportedError(
                f"layer {self.kv_b_proj.prefix!r} cannot be wrapped by {type(method).__name__}: "
                "its weight is multiplied by head."
            )
        return method


class DeepseekModel(LlamaModel):
    """The decoder. Only parts of heads are rotated."""

    def interleaves(self, config: HFConfig) -> bool:
        """Whether the pairs that are rotated are neighbouring dimensions."""
        return True

    def _rotary(self, config: HFConfig) -> RotaryEmbedding:
        return RotaryEmbedding(
            rope_of(config), interleaved=self.interleaves(config), vllm_config=self.vllm_config
        )
