"""How ranks find each other, and which groups they make."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed
from toolkit_lm.config import ParallelConfig
from toolkit_lm.distributed import Group, parallel_groups

from toolkit_lm_executor_mp.memory import MemoryGroup, share_memory
from toolkit_lm_executor_mp.torch_group import TIMEOUT, TorchGroup, together

_dist: Any = torch.distributed
"""Its types know but a part of it."""


class Groups(NamedTuple):
    """Those of one rank. A group of a single rank is no TorchGroup."""

    tensor: Group
    pipeline: Group

    def close(self) -> None:
        for group in self:
            if isinstance(group, TorchGroup):
                group.close()


def connect(parallel: ParallelConfig, path: Path, device: torch.device) -> Groups:
    """The groups of the worker of `parallel.rank`. Waits until the ranks of each group are there.

    `path`: a file that is not there yet, equal on all ranks of one machine; nobody needs it once all are connected. Raises LostRankError.
    """
    tensor, pipeline = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    stage, shard = parallel.pipeline_parallel_rank, parallel.tensor_parallel_rank
    store = _dist.FileStore(str(path), tensor * pipeline)
    return Groups(
        _group(store, f"stage {stage}", shard, tensor, device) if tensor > 1 else Group(),
        _group(store, f"shard {shard}", stage, pipeline, device) if pipeline > 1 else Group(),
    )


def _group(store: Any, name: str, rank: int, size: int, device: torch.device) -> TorchGroup:
    own, timeout = _dist.PrefixStore(name, store), timedelta(seconds=TIMEOUT)
    with together():
        if device.type == "cuda":
            nccl = _dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            return TorchGroup(_dist.ProcessGroupNCCL(own, rank, size, nccl), device)
        gloo = _dist.ProcessGroupGloo._Options()
        # Ranks of one machine: nobody else is listened to, whatever the host's name stands for.
        gloo._devices = [_dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        gloo._timeout = timeout
        process_group = _dist.ProcessGroupGloo(own, rank, size, gloo)
        memory = share_memory(own, rank, size)
        return TorchGroup(process_group, device) if memory is None else MemoryGroup(process_group, device, memory)


@contextmanager
def torch_groups(parallel: ParallelConfig, path: Path, device: torch.device = torch.device("cpu")) -> Iterator[None]:
    """The process is the worker of `parallel.rank`: joins the other ranks as `connect` does, and leaves them at the end."""
    groups = connect(parallel, path, device)
    try:
        with parallel_groups(tensor=groups.tensor, pipeline=groups.pipeline):
            yield
        for group in groups:
            if isinstance(group, TorchGroup):
                group.flush()
    finally:
        groups.close()
