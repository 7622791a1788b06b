"""A group over a process group of torch.distributed: each rank is a process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from toolkit_lm.distributed import Group
from torch import Tensor

from toolkit_lm_executor_mp.socket_group import together


class TorchGroup(Group):
    """A process group of torch.distributed. Calls raise LostRankError once a rank has closed its
    group."""

    def __init__(self, process_group: Any, device: torch.device, store: Any) -> None:
        """Wraps a ProcessGroupGloo or ProcessGroupNCCL.

        `device`: the device of received tensors. `store`: the store where the ranks meet. NCCL's
        ranks meet at their first exchange, so the group holds the store until it is left.
        """
        self.rank = process_group.rank()
        self.size = process_group.size()
        self._store = store
        self._process_group = process_group
        self._device = device
        self._sent: list[tuple[Any, Tensor]] = []
        """Sends in progress, with the tensors that must live until they have arrived."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        with together():
            self._process_group.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        tensor = tensor.contiguous()
        pieces = [torch.empty_like(tensor) for _ in range(self.size)]
        with together():
            self._process_group.allgather([pieces], [tensor]).wait()
        return torch.cat(pieces, dim)

    def send(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        """Returns before the tensors have arrived, so that a stage can begin its next step."""
        described = {
            name: (str(tensor.dtype).removeprefix("torch."), tensor.shape)
            for name, tensor in tensors.items()
        }
        header = torch.frombuffer(bytearray(msgspec.msgpack.encode(described)), dtype=torch.uint8)
        self.flush()
        with together():
            for part in (torch.tensor([len(header)]), header, *tensors.values()):
                tensor = part.to(self._device).contiguous()
                self._sent.append((self._process_group.send([tensor], rank, 0), tensor))

    def flush(self) -> None:
        """Waits until all messages are sent and their tensors may be freed."""
        with together():
            while self._sent:
                self._sent.pop()[0].wait()

    def recv(self, rank: int) -> dict[str, Tensor]:
        def receive(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            self._process_group.recv([tensor], rank, 0).wait()
            return tensor

        with together():
            header = receive((int(receive((1,), torch.int64)),), torch.uint8)
            described = msgspec.msgpack.decode(
                header.cpu().numpy().tobytes(), type=dict[str, tuple[str, tuple[int, ...]]]
            )
            return {
                name: receive(shape, getattr(torch, dtype))
                for name, (dtype, shape) in described.items()
            }

    def close(self) -> None:
        """Leaves the group. The other ranks' calls then fail.

        Nothing else may hold the calls' results, such as a traceback.
        """
        self._sent.clear()
        self._process_group = None
        # Now that nothing reads it any more.
        self._store = None
