"""Groups of ranks: four processes, threads of one process, and a rank alone."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.distributed import (
    Group,
    parallel_groups,
    pipeline_parallel_group,
    tensor_parallel_group,
)
from toolkit_lm.model import RowParallelLinear

CONFIG = VllmConfig.default(tensor_parallel_size=2)


class Double(Group):
    """Two ranks of which the other has the same tensors."""

    size = 2

    def __init__(self, rank=0):
        self.rank = rank

    def all_reduce(self, tensor):
        return tensor * 2

    def all_gather(self, tensor, dim):
        return torch.cat([tensor, tensor], dim)

    def send(self, tensors, rank): ...

    def recv(self, rank):
        return {}


def test_collectives_of_four_ranks(tmp_path):
    script = str(Path(__file__).with_name("group_rank.py"))
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), str(tmp_path / "sync")])
        for rank in range(4)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0] * 4


def test_a_single_rank_needs_no_groups():
    parallel = VllmConfig.default().parallel
    x = torch.randn(2, 3)
    for group in (tensor_parallel_group(parallel), pipeline_parallel_group(parallel)):
        assert (group.rank, group.size) == (0, 1)
        assert group.all_reduce(x) is x
        assert group.all_gather(x, 0) is x


def test_a_shard_can_be_made_but_not_run_outside_its_groups():
    layer = RowParallelLinear(4, 2, vllm_config=CONFIG, prefix="layer")
    with pytest.raises(
        AssertionError,
        match=r"2 tensor parallel ranks runs outside toolkit_lm\.distributed\.parallel_groups",
    ):
        layer(torch.zeros(1, 2))


def test_groups_are_the_thread_s_own():
    found = {}

    def worker(rank):
        with parallel_groups(tensor=Double(rank)):
            entered.wait()
            found[rank] = tensor_parallel_group(CONFIG.parallel).rank

    entered = threading.Barrier(3)
    threads = [threading.Thread(target=worker, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    entered.wait()
    with pytest.raises(AssertionError, match="outside"):
        tensor_parallel_group(CONFIG.parallel)
    for thread in threads:
        thread.join()
    assert found == {0: 0, 1: 1}


def test_a_group_of_another_size_is_refused():
    four = VllmConfig.default(tensor_parallel_size=4).parallel
    with (
        parallel_groups(tensor=Double()),
        pytest.raises(AssertionError, match="has 2 ranks, and a model was made for 4"),
    ):
        tensor_parallel_group(four)


def test_workers_do_not_nest_and_their_groups_end_with_an_error():
    with (
        pytest.raises(AssertionError, match="inside another"),
        parallel_groups(tensor=Double()),
        parallel_groups(),
    ):
        pass
    with parallel_groups(tensor=Double()):
        assert tensor_parallel_group(CONFIG.parallel).size == 2
