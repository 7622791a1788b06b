"""Groups in which trainers send weights, by vLLM's names for NCCL's. Tensors go over TCP by Gloo,
whatever their device; a server takes them with its option `rl.weight_transfer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from toolkit_lm.errors import RequestError
from toolkit_lm_rl.weight_group import WeightGroup, WeightGroupError
from torch import Tensor


class StatelessProcessGroup:
    """A group beside torch.distributed's default group."""

    def __init__(self, group: WeightGroup) -> None:
        self.rank = group.rank
        self.world_size = group.size
        self.socket: object = None
        """No effect: rank 0 listens by itself."""
        self._group: WeightGroup | None = group

    @classmethod
    def create(
        cls,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        data_expiration_seconds: int = 3600,
        store_timeout: int = 300,
    ) -> StatelessProcessGroup:
        """Joins a group: rank 0 listens at `port`. Waits for the others. Raises WeightGroupError
        after `store_timeout` seconds."""
        return cls(WeightGroup(host, port, rank, world_size, store_timeout))

    @property
    def store(self) -> object:
        """What holds the group; trainers set it to None to leave."""
        return self._group

    @store.setter
    def store(self, value: None) -> None:
        if self._group is not None:
            self._group.close()
        self._group = value

    def barrier(self) -> None:
        """Waits until all ranks are here. Raises WeightGroupError."""
        self.joined().barrier()

    def joined(self) -> WeightGroup:
        """The group. Raises WeightGroupError, once it was left."""
        if self._group is None:
            raise WeightGroupError("the group was left.")
        return self._group


class PyNcclCommunicator:
    """A group's broadcasts."""

    def __init__(self, group: StatelessProcessGroup, device: Any = None) -> None:
        """`device`: no effect; each tensor has its own."""
        if not isinstance(group, StatelessProcessGroup):
            raise RequestError(
                f"group must be of StatelessProcessGroup.create, not a {type(group).__name__}.",
                "group",
            )
        self.group = group
        self.rank = group.rank
        self.world_size = group.world_size
        self.device = torch.device("cpu") if device is None else device
        self.disabled = False
        self.available = True

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        """Has all ranks fill `tensor` with that of rank `src`. Raises WeightGroupError."""
        self.group.joined().broadcast(tensor, src)


def trainer_init(init_info: Mapping[str, Any] | Any) -> PyNcclCommunicator:
    """Meets a server, as rank 0, while it answers /init_weight_transfer_engine with the same
    `init_info`: master_address, master_port and world_size. Raises WeightGroupError."""
    found = init_info if isinstance(init_info, Mapping) else vars(init_info)
    # A server is one member, whatever the number of its ranks.
    group = WeightGroup(found["master_address"], found["master_port"], 0, 2)
    return PyNcclCommunicator(StatelessProcessGroup(group))


def packed_nccl_broadcast_producer(
    iterator: Iterable[Any],
    group: PyNcclCommunicator,
    src: int = 0,
    post_iter_func: Callable[[Any], Tensor] | None = None,
    buffer_size_bytes: int | None = None,
    num_buffers: int | None = None,
) -> None:
    """Sends tensors in their order. `post_iter_func`: gives the tensor of an entry; None: it is the
    second of a pair. The sizes of buffers have no effect. Raises WeightGroupError."""
    for entry in iterator:
        group.broadcast(entry[1] if post_iter_func is None else post_iter_func(entry), src)


def packed_nccl_broadcast_consumer(
    iterator: Iterable[tuple[str, tuple[Iterable[int], torch.dtype]]],
    group: PyNcclCommunicator,
    src: int,
    post_unpack_func: Callable[[list[tuple[str, Tensor]]], Any],
    buffer_size_bytes: int | None = None,
    num_buffers: int | None = None,
    device: Any = "cpu",
) -> None:
    """Receives tensors in their order, of which `iterator` has names, shapes and dtypes, and hands
    each on. Raises WeightGroupError."""
    for name, (shape, dtype) in iterator:
        tensor = torch.empty([*shape], dtype=dtype, device=device)
        group.broadcast(tensor, src)
        post_unpack_func([(name, tensor)])
