"""The norm of an axis that is spread over ranks, which are threads here, is that of the whole axis."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.distributed import Group, parallel_groups
from toolkit_lm.model import Part
from toolkit_lm_decoder.sharded_norm import ShardedRMSNorm


class Threads(Group):
    """Two threads that add up what they bring."""

    size = 2

    def __init__(self, rank, brought, barrier):
        self.rank, self.brought, self.barrier = rank, brought, barrier

    def all_reduce(self, tensor):
        self.brought[self.rank] = tensor
        self.barrier.wait(timeout=60)
        return self.brought[0] + self.brought[1]


@pytest.mark.parametrize("is_whole", [False, True], ids=["split", "held by both"])
def test_ranks_norm_as_one_alone(is_whole):
    x, weight = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)), torch.arange(8.0)
    expected = torch.nn.functional.rms_norm(x, (8,), weight, 1e-5)
    brought, barrier = [None, None], threading.Barrier(2)

    def run(rank):
        config = VllmConfig.default(tensor_parallel_size=2).with_rank(rank)
        part = Part.whole(8) if is_whole else Part(8, rank * 4, 4)
        norm, mine = ShardedRMSNorm(part, eps=1e-5, vllm_config=config), slice(part.start, part.start + part.size)
        norm.weight.weight_loader(norm.weight, weight)
        with parallel_groups(tensor=Threads(rank, brought, barrier)):
            return norm(x[:, mine]), expected[:, mine]

    with ThreadPoolExecutor(2) as pool:
        for ours, whole in pool.map(run, range(2)):
            torch.testing.assert_close(ours, whole)
