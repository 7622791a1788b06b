"""Groups of processes in which weights are broadcast: Gloo over TCP, from any device to any."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
from toolkit_lm.errors import ToolkitError
from torch import Tensor

_dist: Any = torch.distributed

SECONDS = 120.0
"""Time that a rank waits for the others."""


class WeightGroupError(ToolkitError):
    """Another rank of a group did not come, left, or sent nothing in time."""


class WeightGroup:
    """A process's membership in a group. It is independent of torch.distributed's default group."""

    def __init__(
        self, address: str, port: int, rank: int, size: int, seconds: float = SECONDS
    ) -> None:
        """Joins the group, and waits for its other ranks. Rank 0 listens at `port`, where the
        others reach it by `address`. Whoever reaches the port in this time can take part.

        Raises WeightGroupError if they do not meet in `seconds`.
        """
        self.rank = rank
        self.size = size
        limit = timedelta(seconds=seconds)
        try:
            self._store: Any = _dist.TCPStore(
                address, port, size, rank == 0, timeout=limit, wait_for_workers=False
            )
            options = _dist.ProcessGroupGloo._Options()
            own = address if rank == 0 else _address_towards(address, port)
            options._devices = [_dist.ProcessGroupGloo.create_device(hostname=own)]
            options._timeout = limit
            store = _dist.PrefixStore("weights", self._store)
            self._group: Any = _dist.ProcessGroupGloo(store, rank, size, options)
        except (RuntimeError, OSError, ValueError) as error:
            raise WeightGroupError(
                f"rank {rank} of {size} did not meet the others at {address}:{port}: {error}"
            ) from error

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Has all ranks fill their `tensor`, of one size in bytes, with that of rank `source`.
        Raises WeightGroupError."""
        if self._group is None:
            raise WeightGroupError("the group was left.")
        inside = tensor.detach().to("cpu").contiguous()
        if not inside.nbytes:
            return
        try:
            self._group.broadcast(inside.view(-1).view(torch.uint8), root=source).wait()
        except (RuntimeError, OSError, ValueError) as error:
            raise WeightGroupError(f"rank {source} sent no tensor: {error}") from error
        if self.rank != source and inside.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(inside)

    def barrier(self) -> None:
        """Waits until all ranks are here. Raises WeightGroupError."""
        for source in range(self.size):
            self.broadcast(torch.zeros(1, dtype=torch.uint8), source)

    def close(self) -> None:
        """Leaves the group: other ranks that wait for this one get an error. Safe to call twice."""
        self._group = self._store = None


def _address_towards(address: str, port: int) -> str:
    """This machine's address for a machine of another."""
    family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # Sends nothing: it asks for the way there.
        probe.connect(target)
        found: str = probe.getsockname()[0]
    return found
