"""The norm of an axis that is spread over ranks, which are threads here, is that of the whole
axis."""

from __future__ import annotations

import pytest
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import Shard
from toolkit_lm_decoder.sharded_norm import ShardedRMSNorm
from toolkit_lm_devkit import run_ranks


@pytest.mark.parametrize("is_whole", [False, True], ids=["split", "held by both"])
def test_ranks_norm_as_one_alone(is_whole):
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    weight = torch.arange(8.0)
    expected = torch.nn.functional.rms_norm(x, (8,), weight, 1e-5)

    def run(rank):
        config = VllmConfig.default(tensor_parallel_size=2).with_rank(rank)
        shard = Shard.whole(8) if is_whole else Shard(8, rank * 4, 4)
        norm = ShardedRMSNorm(shard, eps=1e-5, vllm_config=config)
        mine = slice(shard.start, shard.start + shard.size)
        norm.weight.weight_loader(norm.weight, weight)
        return norm(x[:, mine]), expected[:, mine]

    for ours, whole in run_ranks(run):
        torch.testing.assert_close(ours, whole)
