"""Groups over torch.distributed: each rank is a process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed
from toolkit_lm.config import ParallelConfig
from toolkit_lm.distributed import Group, parallel_groups
from torch import Tensor

_dist: Any = torch.distributed
"""Its types know but a part of it."""
TIMEOUT = 600.0
"""Seconds that a rank waits for another one in a collective. A pipeline stage waits as long as the stage before computes."""


class LostRankError(RuntimeError):
    """Another rank of the group has failed, has died, or does not come."""


@contextmanager
def _together() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(f"another rank has left the group: {error}") from error


class TorchGroup(Group):
    """A process group of torch.distributed. Its calls raise LostRankError once a rank has closed its own."""

    def __init__(self, process_group: Any, device: torch.device) -> None:
        """`process_group`: a ProcessGroupGloo or ProcessGroupNCCL. `device`: where tensors that are received are put."""
        self.rank, self.size = process_group.rank(), process_group.size()
        self._process_group = process_group
        self._device = device
        self._sent: list[tuple[Any, Tensor]] = []
        """What is on its way, with the tensors that must live until it has arrived."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        with _together():
            self._process_group.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        tensor = tensor.contiguous()
        pieces = [torch.empty_like(tensor) for _ in range(self.size)]
        with _together():
            self._process_group.allgather([pieces], [tensor]).wait()
        return torch.cat(pieces, dim)

    def send(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        """Returns before they have arrived, so that a stage can begin its next step."""
        described = {name: (str(tensor.dtype).removeprefix("torch."), tensor.shape) for name, tensor in tensors.items()}
        header = torch.frombuffer(bytearray(msgspec.msgpack.encode(described)), dtype=torch.uint8)
        self.flush()
        with _together():
            for one in (torch.tensor([len(header)]), header, *tensors.values()):
                tensor = one.to(self._device).contiguous()
                self._sent.append((self._process_group.send([tensor], rank, 0), tensor))

    def flush(self) -> None:
        """Waits until what was sent is on its way, and its tensors are of no more use."""
        with _together():
            while self._sent:
                self._sent.pop()[0].wait()

    def recv(self, rank: int) -> dict[str, Tensor]:
        def receive(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            self._process_group.recv([tensor], rank, 0).wait()
            return tensor

        with _together():
            header = receive((int(receive((1,), torch.int64)),), torch.uint8)
            described = msgspec.msgpack.decode(header.cpu().numpy().tobytes(), type=dict[str, tuple[str, tuple[int, ...]]])
            return {name: receive(shape, getattr(torch, dtype)) for name, (dtype, shape) in described.items()}

    def close(self) -> None:
        """Leaves: the other ranks' calls fail. Nothing else may hold what the calls returned, a traceback for instance."""
        self._sent.clear()
        self._process_group = None


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
    with _together():
        if device.type == "cuda":
            nccl = _dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            return TorchGroup(_dist.ProcessGroupNCCL(own, rank, size, nccl), device)
        gloo = _dist.ProcessGroupGloo._Options()
        # Ranks of one machine: nobody else is listened to, whatever the host's name stands for.
        gloo._devices = [_dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        gloo._timeout = timeout
        return TorchGroup(_dist.ProcessGroupGloo(own, rank, size, gloo), device)


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
