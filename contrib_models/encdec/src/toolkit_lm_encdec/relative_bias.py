"""The bias of attention scores by distance (T5), which all layers of a stack share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import HFConfig, Shard, ShardLoader, new_parameter, torch_dtype
from torch import Tensor, nn

_MOST_DISTANCE = 2**20


class RelativeBias(nn.Module):
    """Query positions [Tq], key positions [Tk] -> bias [heads, Tq, Tk]: a learned number per head
    and bucket of distances.

    The checkpoint's table is [buckets, heads]. It is kept as [heads, 2 * max_distance + 1], by the
    offset of a key from its query. One look-up then gives the bias as it is added, several times as
    fast.
    """

    def __init__(self, *, is_causal: bool, vllm_config: VllmConfig) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        num_buckets = config.get("relative_attention_num_buckets", int, 32)
        self.max_distance = config.get("relative_attention_max_distance", int, 128)
        if num_buckets < 4 or not num_buckets // 2 < self.max_distance <= _MOST_DISTANCE:
            raise CheckpointError(
                "config.json: 'relative_attention_num_buckets' must be 4 or more, not "
                f"{num_buckets}, and "
                "'relative_attention_max_distance' more than half of it, up to "
                f"{_MOST_DISTANCE}, not {self.max_distance}."
            )
        heads = Shard.even(
            config.require("num_heads", int), vllm_config.parallel, "attention heads"
        )
        offsets = torch.arange(-self.max_distance, self.max_distance + 1)
        buckets = buckets_of(offsets, num_buckets, self.max_distance, is_causal=is_causal)
        loader = TableLoader(shards=(heads,), num_buckets=num_buckets, buckets=buckets)
        self.weight = new_parameter(
            (heads.size, len(offsets)), torch_dtype(vllm_config.model.dtype), loader
        )

    def forward(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        offsets = (
            (k_positions - q_positions[:, None])
            .clamp_(-self.max_distance, self.max_distance)
            .add_(self.max_distance)
        )
        return self.weight.index_select(1, offsets.flatten()).view(-1, *offsets.shape)

    def by_offset(self, most: int) -> Tensor:
        """[heads, 2 * most + 1]."""
        offsets = torch.arange(-most, most + 1, device=self.weight.device)
        return self.weight[
            :, offsets.clamp_(-self.max_distance, self.max_distance).add_(self.max_distance)
        ]


@dataclass(frozen=True, eq=False, kw_only=True)
class TableLoader(ShardLoader):
    """Fills a RelativeBias from the table of a checkpoint."""

    num_buckets: int
    buckets: Tensor
    """[offsets] int64: of each offset."""

    def __call__(self, param: Tensor, loaded: Tensor, shard_id: int | None = None) -> None:
        shape = [self.num_buckets, self.shards[0].full]
        if list(loaded.shape) != shape:
            raise CheckpointError(f"has shape {list(loaded.shape)}, not {shape}")
        super().__call__(param, loaded[self.buckets.to(loaded.device)].t(), shard_id)


def buckets_of(offsets: Tensor, num_buckets: int, max_distance: int, *, is_causal: bool) -> Tensor:
    """The bucket of each offset of a key from its query: small distances have one each, large ones
    are grouped by logarithm.

    Where attention is causal, all buckets are for keys that came before; otherwise half of them are
    for either side.
    """
    if is_causal:
        distance = (-offsets).clamp(min=0)
        side = torch.zeros_like(offsets)
    else:
        num_buckets //= 2
        distance = offsets.abs()
        side = (offsets > 0) * num_buckets
    exact = num_buckets // 2
    # Rounded as the original: at the edge of a bucket, another order of operations could come out
    # on its other side.
    grown = (
        torch.log(distance.clamp(min=1).float() / exact)
        / math.log(max_distance / exact)
        * (num_buckets - exact)
    )
    far = (exact + grown.long()).clamp(max=num_buckets - 1)
    return side + torch.where(distance < exact, distance, far)
