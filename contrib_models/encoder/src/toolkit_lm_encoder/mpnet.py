"""MPNet (Song et al. 2020): BERT with a bias of attention scores by distance, which all layers
share."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import torch
from toolkit_lm.attention import AttentionBias
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import HFConfig, Shard, ShardLoader, new_parameter, torch_dtype
from torch import Tensor, nn

from toolkit_lm_encoder.bert import BertEncoder, BertShape
from toolkit_lm_encoder.encoder import Renames
from toolkit_lm_encoder.heads import OUT_PROJ, Embedder, SequenceClassifier, TokenClassifier

POSITION_OFFSET = 2
"""Whatever config.json says of padding."""
NUM_BUCKETS = 32
"""Buckets that are used, however many a checkpoint holds."""
MAX_DISTANCE = 128


class RelativeBias(nn.Module):
    """Query positions [Tq], key positions [Tk] -> bias [heads, Tq, Tk]: a learned number per head
    and bucket of distances."""

    def __init__(self, num_buckets: int, num_heads: int, *, vllm_config: VllmConfig) -> None:
        super().__init__()
        heads = Shard.even(num_heads, vllm_config.parallel, "attention heads")
        self.weight = new_parameter(
            (num_buckets, heads.size),
            torch_dtype(vllm_config.model.dtype),
            ShardLoader((heads,), dim=1),
        )

    def forward(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        return self.weight[buckets(k_positions - q_positions[:, None])].permute(2, 0, 1)

    def by_offset(self, most: int) -> Tensor:
        """[heads, 2 * most + 1]."""
        return self.weight[buckets(torch.arange(-most, most + 1, device=self.weight.device))].t()


def buckets(offsets: Tensor) -> Tensor:
    """The bucket of each offset of a key from its query: half of them for either side; small
    distances apart, large ones by logarithm."""
    half = NUM_BUCKETS // 2
    exact = half // 2
    distance = offsets.abs()
    scale = math.log(MAX_DISTANCE / exact)
    far = exact + (torch.log(distance.clamp(min=1).float() / exact) / scale * (half - exact)).long()
    return (offsets > 0) * half + torch.where(distance < exact, distance, far.clamp(max=half - 1))


class MPNetEncoder(BertEncoder):
    """MPNet without a head."""

    renames: ClassVar[Renames] = (
        (r"^mpnet\.", ""),
        (r"\.attention\.attn\.q\.", ".attention.self.query."),
        (r"\.attention\.attn\.k\.", ".attention.self.key."),
        (r"\.attention\.attn\.v\.", ".attention.self.value."),
        (r"\.attention\.attn\.o\.", ".attention.output.dense."),
        (r"\.attention\.LayerNorm\.", ".attention.output.LayerNorm."),
        (r"^encoder\.relative_attention_bias\.", "relative_attention_bias."),
    )

    @classmethod
    def shape(cls, config: HFConfig) -> BertShape:
        return replace(super().shape(config), position_offset=POSITION_OFFSET, num_types=0)

    def make_bias(self, shape: BertShape) -> AttentionBias | None:
        num_buckets = HFConfig(self.vllm_config.hf_config).get(
            "relative_attention_num_buckets", int, NUM_BUCKETS
        )
        self.relative_attention_bias = RelativeBias(
            num_buckets, shape.num_heads, vllm_config=self.vllm_config
        )
        return self.relative_attention_bias


class MPNetModel(Embedder, MPNetEncoder):
    pass


class MPNetForSequenceClassification(SequenceClassifier, MPNetEncoder):
    pass


class MPNetForTokenClassification(TokenClassifier, MPNetEncoder):
    renames = (*MPNetEncoder.renames, OUT_PROJ)
