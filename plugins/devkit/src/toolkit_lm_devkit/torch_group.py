"""Groups over torch.distributed: each rank is a process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec
import torch
import torch.distributed as dist
from toolkit_lm.config import ParallelConfig
from toolkit_lm.distributed import Group, parallel_groups
from torch import Tensor


class TorchGroup(Group):
    """A process group of torch.distributed."""

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device) -> None:
        """`device`: where tensors that are received are put."""
        self.process_group = process_group
        self.device = device
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self.process_group)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        tensor = tensor.contiguous()
        pieces = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(pieces, tensor, group=self.process_group)
        return torch.cat(pieces, dim)

    def send(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        described = {name: (str(tensor.dtype).removeprefix("torch."), tensor.shape) for name, tensor in tensors.items()}
        header = torch.frombuffer(bytearray(msgspec.msgpack.encode(described)), dtype=torch.uint8)
        for tensor in (torch.tensor([len(header)]), header, *tensors.values()):
            dist.send(tensor.to(self.device).contiguous(), group=self.process_group, group_dst=rank)

    def recv(self, rank: int) -> dict[str, Tensor]:
        def receive(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            dist.recv(tensor, group=self.process_group, group_src=rank)
            return tensor

        header = receive((int(receive((1,), torch.int64)),), torch.uint8)
        described = msgspec.msgpack.decode(header.cpu().numpy().tobytes(), type=dict[str, tuple[str, tuple[int, ...]]])
        return {name: receive(shape, getattr(torch, dtype)) for name, (dtype, shape) in described.items()}


@contextmanager
def torch_groups(parallel: ParallelConfig, *, init_method: str, backend: str, device: str = "cpu") -> Iterator[None]:
    """The process is the worker of `parallel.rank`: joins the other ranks, and leaves them at the end.

    `init_method` is torch.distributed's ("tcp://host:port", "file:///path"), equal on all ranks; so is `backend` ("gloo", "nccl").
    Waits until all ranks are there. torch.distributed keeps one default group per process, which must have none yet.
    """
    tensor_size, pipeline_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    dist.init_process_group(backend, init_method=init_method, world_size=tensor_size * pipeline_size, rank=parallel.rank)
    try:
        # torch.distributed demands that every rank makes every group, its own or not, in the same order.
        tensor = [dist.new_group([stage * tensor_size + i for i in range(tensor_size)]) for stage in range(pipeline_size)]
        pipeline = [dist.new_group([i * tensor_size + shard for i in range(pipeline_size)]) for shard in range(tensor_size)]
        mine = tensor[parallel.pipeline_parallel_rank], pipeline[parallel.tensor_parallel_rank]
        with parallel_groups(tensor=TorchGroup(mine[0], torch.device(device)), pipeline=TorchGroup(mine[1], torch.device(device))):
            yield
    finally:
        dist.destroy_process_group()
