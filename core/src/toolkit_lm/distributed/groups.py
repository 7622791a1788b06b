"""Process groups over torch.distributed.

torch.distributed keeps one default group per process; the groups made here are its companions and live as long as it does. That is why
they are the state of the process and not of an engine: an engine with several ranks runs each of them in a process of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit_lm.config import ParallelConfig


@dataclass(frozen=True, slots=True)
class Group:
    """Some ranks that exchange tensors. All of them must make the same calls in the same order."""

    rank: int
    """This process's place in the group."""
    size: int
    process_group: dist.ProcessGroup | None = None
    """None where the group has one rank, whose collectives do nothing."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, written into `tensor`, which is returned."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.process_group)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensors of all ranks, of equal shape, joined along `dim` in the order of ranks."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        pieces = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(pieces, tensor, group=self.process_group)
        return torch.cat(pieces, dim)


_ALONE = Group(rank=0, size=1)
_groups: dict[str, Group] = {}


def initialize(parallel: ParallelConfig, *, init_method: str, backend: str) -> None:
    """Joins the other ranks and makes the tensor and pipeline groups of `parallel.rank`.

    `init_method` is torch.distributed's ("tcp://host:port", "file:///path"), equal on all ranks; so is `backend` ("gloo", "nccl").
    Blocks until all ranks have called it. A single rank needs no groups, and then nothing is done.
    """
    tensor_size, pipeline_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if tensor_size * pipeline_size == 1:
        return
    assert not dist.is_initialized(), "this process has joined other ranks already"
    dist.init_process_group(backend, init_method=init_method, world_size=tensor_size * pipeline_size, rank=parallel.rank)
    # torch.distributed demands that every rank makes every group, its own or not, in the same order.
    for stage in range(pipeline_size):
        _join("tensor", [stage * tensor_size + i for i in range(tensor_size)], parallel.rank)
    for shard in range(tensor_size):
        _join("pipeline", [i * tensor_size + shard for i in range(pipeline_size)], parallel.rank)


def _join(kind: str, ranks: list[int], rank: int) -> None:
    process_group = dist.new_group(ranks)
    if rank in ranks:
        _groups[kind] = Group(ranks.index(rank), len(ranks), process_group)


def tensor_parallel_group(parallel: ParallelConfig) -> Group:
    """The ranks that share each layer with this one. With one rank it needs no `initialize`."""
    return _group("tensor", parallel.tensor_parallel_size)


def pipeline_parallel_group(parallel: ParallelConfig) -> Group:
    """The ranks that own the other slices of the layers. With one rank it needs no `initialize`."""
    return _group("pipeline", parallel.pipeline_parallel_size)


def _group(kind: str, size: int) -> Group:
    if size == 1:
        return _ALONE
    group = _groups.get(kind)
    assert group is not None, f"a layer over {size} {kind} parallel ranks runs before toolkit_lm.distributed.initialize"
    assert group.size == size, f"the {kind} parallel group has {group.size} ranks, and a layer was made for {size}"
    return group


def destroy() -> None:
    """Leaves the other ranks. Does nothing where `initialize` did nothing."""
    _groups.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
