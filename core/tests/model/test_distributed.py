"""Groups of ranks: four processes over gloo, and one alone."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed
from toolkit_lm.config import VllmConfig
from toolkit_lm.distributed import destroy, initialize, pipeline_parallel_group, tensor_parallel_group
from toolkit_lm.model import RowParallelLinear


def test_collectives_of_four_ranks(tmp_path):
    script = str(Path(__file__).with_name("group_rank.py"))
    ranks = [subprocess.Popen([sys.executable, script, str(rank), str(tmp_path / "sync")]) for rank in range(4)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0] * 4


def test_a_single_rank_needs_no_process_group():
    parallel = VllmConfig.default().parallel
    initialize(parallel, init_method="file:///nowhere", backend="none")
    assert not torch.distributed.is_initialized()
    x = torch.randn(2, 3)
    for group in (tensor_parallel_group(parallel), pipeline_parallel_group(parallel)):
        assert (group.rank, group.size) == (0, 1)
        assert group.all_reduce(x) is x
        assert group.all_gather(x, 0) is x
    destroy()


def test_a_shard_can_be_made_but_not_run_before_its_group():
    layer = RowParallelLinear(4, 2, vllm_config=VllmConfig.default(tensor_parallel_size=2), prefix="layer")
    with pytest.raises(AssertionError, match=r"2 tensor parallel ranks runs before toolkit_lm\.distributed\.initialize"):
        layer(torch.zeros(1, 2))
