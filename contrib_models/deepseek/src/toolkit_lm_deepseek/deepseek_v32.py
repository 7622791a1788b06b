"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention, to the tokens that a "lightning indexer"
chooses (DeepSeek-AI 2025)."""

from __future__ import annotations

from typing import ClassVar

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import HFConfig, LayerNorm, ReplicatedLinear, Rotation, join, torch_dtype
from toolkit_lm_decoder.dense import dense
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit_lm_deepseek.attention import DeepseekAttention
from toolkit_lm_deepseek.glm4_moe_lite import Glm4MoeLiteForCausalLM
from toolkit_lm_deepseek.params import Choice, IndexShape

_KEY_EPS = 1e-6
"""Epsilon of the norm of an indexer's keys, which config.json does not state."""


class HeadWeights(nn.Module):
    """The weight of each of an indexer's heads, in float32: x [T, H] -> [T, heads]."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        weight = torch.empty(num_heads, hidden_size, dtype=torch.float32)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight)


class Indexer(nn.Module):
    """Keys of tokens, and what a token looks for among them. Each rank has all of it, so that all
    ranks choose the same."""

    def __init__(
        self, shape: IndexShape, rotated_size: int, *, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        hidden_size = config.require("hidden_size", int)
        self.shape = shape
        self.rotated_size = rotated_size
        self.wq_b = ReplicatedLinear(
            config.require("q_lora_rank", int),
            shape.num_heads * shape.size,
            bias=False,
            vllm_config=vllm_config,
            prefix=join(prefix, "wq_b"),
        )
        self.wk = ReplicatedLinear(
            hidden_size, shape.size, bias=False, vllm_config=vllm_config, prefix=join(prefix, "wk")
        )
        self.k_norm = LayerNorm(
            shape.size, eps=_KEY_EPS, dtype=torch_dtype(vllm_config.model.dtype)
        )
        self.weights_proj = HeadWeights(hidden_size, shape.num_heads)

    def keys(self, x: Tensor, rotation: Rotation) -> Tensor:
        """x [T, H] -> [T, size]."""
        return self._rotated(self.k_norm(self.wk(x)).unsqueeze(1), rotation).squeeze(1)

    def sought(self, x: Tensor, inputs: Tensor, rotation: Rotation) -> Tensor:
        """x [T, H] and the inputs of queries [T, query rank] -> queries and weights of heads (see
        LatentParams). Constant factors change no choice, and are left out."""
        q = self.wq_b(inputs).view(len(x), self.shape.num_heads, self.shape.size)
        queries = self._rotated(q, rotation).flatten(1)
        return torch.cat([queries.float(), self.weights_proj(x)], dim=-1)

    def _rotated(self, x: Tensor, rotation: Rotation) -> Tensor:
        """x [T, heads, size] with its first dimensions rotated."""
        first, rest = torch.split(
            x, [self.rotated_size, self.shape.size - self.rotated_size], dim=-1
        )
        return torch.cat([rotation.rotate(dense(self.paired(first))), rest], dim=-1)

    def paired(self, x: Tensor) -> Tensor:
        """Dimensions [..., N] that are rotated together side by side, as attention has them: here
        they lie half of N apart. Products of queries and keys do not depend on the order."""
        return torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)


class DeepseekV32Attention(DeepseekAttention):
    """Multi-head latent attention to the tokens that an indexer chooses."""

    indexer_class: ClassVar[type[Indexer]] = Indexer

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.indexer: Indexer | None = None
        if (shape := self.attn.params.index) is not None:
            self.indexer = self.indexer_class(
                shape, self.rotated_size, vllm_config=vllm_config, prefix=join(prefix, "indexer")
            )

    def index_shape(self, config: HFConfig) -> IndexShape | None:
        shape = IndexShape(
            config.require("index_n_heads", int), config.require("index_head_dim", int)
        )
        if shape.num_heads < 1 or shape.size < self.rotated_size:
            raise CheckpointError(
                "config.json: 'index_n_heads' must be 1 at least, and 'index_head_dim' "
                f"'qk_rope_head_dim' ({self.rotated_size}) at least, not {list(shape)}."
            )
        return shape

    def choice(self, config: HFConfig) -> Choice:
        if (top_k := config.require("index_topk", int)) < 1:
            raise CheckpointError(f"config.json: 'index_topk' must be 1 at least, not {top_k}.")
        return Choice(top_k)

    def attend(
        self, q: Tensor, kept: Tensor, x: Tensor, inputs: Tensor, rotation: Rotation
    ) -> Tensor:
        if self.indexer is None:
            return super().attend(q, kept, x, inputs, rotation)
        kept = torch.cat([kept, self.indexer.keys(x, rotation)], dim=-1)
        out: Tensor = self.attn(q, kept, self.indexer.sought(x, inputs, rotation))
        return out


class DeepseekV32ForCausalLM(Glm4MoeLiteForCausalLM):
    attention = DeepseekV32Attention
    num_dense = 3
    chooses_tokens = True
