"""How ranks find each other, and which groups they make."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
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


class MasterStore(NamedTuple):
    """Where ranks of several machines meet: a TCPStore of the engine's process."""

    address: str
    port: int
    attempt: int
    """Ranks that connect anew meet under another number."""


def connect(parallel: ParallelConfig, meeting: Path | MasterStore, device: torch.device) -> Groups:
    """The groups of the worker of `parallel.rank`. Waits until the ranks of each group are there. Raises LostRankError.

    `meeting`: a file that is not there yet, equal on all ranks of one machine; nobody needs it once all are connected. Or the store.
    """
    tensor, pipeline = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    stage, shard = parallel.pipeline_parallel_rank, parallel.tensor_parallel_rank
    store, address = _store(meeting, tensor * pipeline)
    return Groups(
        _group(store, address, f"stage {stage}", shard, range(stage * tensor, (stage + 1) * tensor), parallel, device),
        _group(store, address, f"shard {shard}", stage, range(shard, tensor * pipeline, tensor), parallel, device),
    )


def _store(meeting: Path | MasterStore, num_ranks: int) -> tuple[Any, str]:
    """Where the ranks find each other, and the address of this machine at which others reach it."""
    if isinstance(meeting, Path):
        # Ranks of one machine: nobody else is listened to, whatever the host's name stands for.
        return _dist.FileStore(str(meeting), num_ranks), "127.0.0.1"
    with together():
        store = _dist.TCPStore(meeting.address, meeting.port, is_master=False, timeout=timedelta(seconds=TIMEOUT))
    family = socket.AF_INET6 if ":" in meeting.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Sends nothing: it asks for the way there.
        probe.connect((meeting.address, meeting.port))
        return _dist.PrefixStore(f"attempt {meeting.attempt}", store), probe.getsockname()[0]


def _group(store: Any, address: str, name: str, rank: int, ranks: Sequence[int], parallel: ParallelConfig, device: torch.device) -> Group:
    """`rank`: the place in the group of `ranks`."""
    size = len(ranks)
    if size == 1:
        return Group()
    own, timeout = _dist.PrefixStore(name, store), timedelta(seconds=TIMEOUT)
    with together():
        if device.type == "cuda":
            nccl = _dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            return TorchGroup(_dist.ProcessGroupNCCL(own, rank, size, nccl), device)
        gloo = _dist.ProcessGroupGloo._Options()
        gloo._devices = [_dist.ProcessGroupGloo.create_device(hostname=address)]
        gloo._timeout = timeout
        process_group = _dist.ProcessGroupGloo(own, rank, size, gloo)
        is_near = ranks[0] // parallel.ranks_per_node == ranks[-1] // parallel.ranks_per_node
        memory = share_memory(own, rank, size) if is_near else None
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
