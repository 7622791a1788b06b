"""How ranks find each other, and which groups they make."""

from __future__ import annotations

import hmac
import os
import socket
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed
from toolkit_lm.config import ParallelConfig
from toolkit_lm.distributed import Group, parallel_groups

from toolkit_lm_executor_mp.memory import MemoryGroup, share_memory
from toolkit_lm_executor_mp.network import shut
from toolkit_lm_executor_mp.socket_group import TIMEOUT, SocketGroup, meet_by, meet_in, together
from toolkit_lm_executor_mp.store import OpenFileStore, SignedStore
from toolkit_lm_executor_mp.torch_group import TorchGroup

_dist: Any = torch.distributed
"""torch.distributed as Any: its type stubs cover only a part of it."""
_HAS_ABSTRACT = hasattr(os, "memfd_create") and hasattr(socket, "SO_PEERCRED")
"""Whether abstract Unix sockets and SO_PEERCRED exist, as on Linux."""


class Groups(NamedTuple):
    """The tensor parallel and pipeline parallel group of one rank. A group of a single rank is a
    plain Group."""

    tensor: Group
    pipeline: Group

    def flush(self) -> None:
        """Waits until all messages are sent."""
        for group in self:
            if isinstance(group, SocketGroup | TorchGroup):
                group.flush()

    def close(self) -> None:
        for group in self:
            if isinstance(group, SocketGroup | TorchGroup):
                group.close()


class MasterStore(NamedTuple):
    """A TCPStore in the engine's process, where ranks of several machines meet."""

    address: str
    port: int
    attempt: int
    """Number of the attempt. Ranks that reconnect meet under another number."""
    key: bytes
    """Secret of the attempt, with which ranks sign their values in the store. It reaches them over
    the engine's encrypted connections."""


def connect(parallel: ParallelConfig, meeting: Path | MasterStore, device: torch.device) -> Groups:
    """Connects the groups of the worker of `parallel.rank`. Waits until the ranks of each group are
    there. Raises LostRankError.

    `meeting`: a store, or a folder that does not exist yet. All ranks of one machine name the same
    folder. Only their user may enter its parent. The folder is of no use once all ranks are
    connected.
    """
    tensor = parallel.tensor_parallel_size
    pipeline = parallel.pipeline_parallel_size
    stage = parallel.pipeline_parallel_rank
    shard = parallel.tensor_parallel_rank
    by_name = {
        "stage": (stage, shard, range(stage * tensor, (stage + 1) * tensor)),
        "shard": (shard, stage, range(shard, tensor * pipeline, tensor)),
    }
    made = [
        _group(meeting, f"{kind} {number}", rank, ranks, parallel, device)
        for kind, (number, rank, ranks) in by_name.items()
    ]
    return Groups(*made)


def _group(
    meeting: Path | MasterStore,
    name: str,
    rank: int,
    ranks: Sequence[int],
    parallel: ParallelConfig,
    device: torch.device,
) -> Group:
    """Connects one group. `rank`: this rank's index in `ranks`."""
    size = len(ranks)
    if size == 1:
        return Group()
    if isinstance(meeting, Path):
        return (
            _near(meet_in(meeting, name, rank, size))
            if device.type == "cpu"
            else _nccl_here(meeting, name, rank, size, device)
        )
    store, address = _store(meeting, name)
    if device.type == "cuda":
        return _nccl(store, rank, size, device)
    is_near = ranks[0] // parallel.ranks_per_node == ranks[-1] // parallel.ranks_per_node
    if is_near and _HAS_ABSTRACT:
        return _near(meet_by(store, rank, size))
    return _gloo(store, rank, size, device, address)


def _near(group: SocketGroup) -> SocketGroup:
    """Adds shared memory to a group, if all its ranks can map it."""
    memory = share_memory(group)
    return group if memory is None else MemoryGroup(group, memory)


def _store(meeting: MasterStore, name: str) -> tuple[SignedStore, str]:
    """Returns the store where the ranks of a group meet, and this machine's address for the other
    ranks."""
    with together():
        store = _dist.TCPStore(
            meeting.address, meeting.port, is_master=False, timeout=timedelta(seconds=TIMEOUT)
        )
    family = socket.AF_INET6 if ":" in meeting.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Sends nothing: it asks for the way there.
        probe.connect((meeting.address, meeting.port))
        prefix = f"attempt {meeting.attempt} {name}"
        return SignedStore(
            _dist.PrefixStore(prefix, store), hmac.digest(meeting.key, prefix.encode(), "sha256")
        ), probe.getsockname()[0]


def _gloo(store: Any, rank: int, size: int, device: torch.device, address: str) -> TorchGroup:
    """Makes a Gloo group over TCP at `address`. Nobody else can connect once the ranks are
    connected."""
    others = _listeners()
    options = _dist.ProcessGroupGloo._Options()
    with together():
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=False)]
        options._timeout = timedelta(seconds=TIMEOUT)
        process_group = _dist.ProcessGroupGloo(store, rank, size, options)
    for descriptor in _listeners() - others:
        with socket.socket(fileno=os.dup(descriptor)) as listener:
            shut(listener)
    return TorchGroup(process_group, device, store)


def _nccl_here(folder: Path, name: str, rank: int, size: int, device: torch.device) -> TorchGroup:
    """Makes an NCCL group of ranks on one machine. NCCL listens on the loopback interface, unless
    NCCL_SOCKET_IFNAME is set."""
    folder.mkdir(mode=0o700, exist_ok=True)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return _nccl(OpenFileStore(folder / name), rank, size, device)


def _nccl(store: Any, rank: int, size: int, device: torch.device) -> TorchGroup:
    """Makes an NCCL group. Its ranks meet in the store at their first exchange, each pair of a
    pipeline separately."""
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=TIMEOUT)
    with together():
        return TorchGroup(_dist.ProcessGroupNCCL(store, rank, size, options), device, store)


def _listeners() -> set[int]:
    """Descriptors of this process's sockets that listen to a network. Empty except on Linux."""
    found = set()
    with suppress(FileNotFoundError):
        for word in os.listdir("/proc/self/fd"):
            # The one that lists them is closed by now, and most are no sockets.
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(int(word)).st_mode) and _listens(int(word)):
                    found.add(int(word))
    return found


def _listens(descriptor: int) -> bool:
    """Whether a socket takes connections from a network."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        is_network = connection.family in (socket.AF_INET, socket.AF_INET6)
        return is_network and bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


@contextmanager
def torch_groups(
    parallel: ParallelConfig, path: Path, device: torch.device = torch.device("cpu")
) -> Iterator[None]:
    """Joins the groups of the worker of `parallel.rank`, and leaves them at the end.

    `path`: the folder where the ranks of this machine meet.
    """
    groups = connect(parallel, path, device)
    try:
        with parallel_groups(tensor=groups.tensor, pipeline=groups.pipeline):
            yield
        groups.flush()
    finally:
        groups.close()
