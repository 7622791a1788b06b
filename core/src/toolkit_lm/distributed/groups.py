"""Groups of ranks: the contract, and the lookup of the running worker's groups."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from toolkit_lm.config import ParallelConfig


class Group:
    """Ranks that exchange tensors, as seen by one of them. All ranks make the same calls in the
    same order.

    This class is the group of a single rank. An executor with several workers brings a subclass
    that overrides all methods.
    """

    rank: int = 0
    """Index of this rank in the group."""
    size: int = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Returns the sum over all ranks, bit-identical on each. It may be written into
        `tensor`."""
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Returns the tensors of all ranks, of equal shape, concatenated along `dim` in the order
        of ranks."""
        return tensor

    def send(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        """Sends tensors, by name, to another rank of the group. The caller does not change them
        afterwards."""
        raise NotImplementedError(f"{type(self).__name__} has no rank {rank} to send to")

    def recv(self, rank: int) -> dict[str, Tensor]:
        """Receives the tensors that another rank of the group has sent, and waits for them.
        Messages of a rank arrive in order."""
        raise NotImplementedError(f"{type(self).__name__} has no rank {rank} to receive from")


_ALONE = Group()
_local = threading.local()


@contextmanager
def parallel_groups(*, tensor: Group = _ALONE, pipeline: Group = _ALONE) -> Iterator[None]:
    """Context that sets the groups of the layers run by this thread. Refuses to nest.

    Groups belong to the thread and not to the process, so that ranks can be threads of one process.
    """
    assert not hasattr(_local, "groups"), "a worker runs inside another one on the same thread"
    _local.groups = {"tensor": tensor, "pipeline": pipeline}
    try:
        yield
    finally:
        del _local.groups


def tensor_parallel_group(parallel: ParallelConfig) -> Group:
    """The ranks that share each layer with this one. A single rank needs no `parallel_groups`."""
    return _group("tensor", parallel.tensor_parallel_size)


def pipeline_parallel_group(parallel: ParallelConfig) -> Group:
    """The ranks that own the other slices of the layers. A single rank needs no
    `parallel_groups`."""
    return _group("pipeline", parallel.pipeline_parallel_size)


def _group(kind: str, size: int) -> Group:
    if size == 1:
        return _ALONE
    groups: dict[str, Group] | None = getattr(_local, "groups", None)
    assert groups is not None, (
        f"a model over {size} {kind} parallel ranks runs outside "
        "toolkit_lm.distributed.parallel_groups"
    )
    group = groups[kind]
    assert group.size == size, (
        f"the {kind} parallel group has {group.size} ranks, and a model was made for {size}"
    )
    return group
