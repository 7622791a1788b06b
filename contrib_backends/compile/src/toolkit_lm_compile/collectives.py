"""Collectives of tensor parallel ranks as ops. A compiler sees their output shapes, and the ranks
meet when the code runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import torch
from toolkit_lm.config import ParallelConfig
from toolkit_lm.distributed import Group, parallel_groups, tensor_parallel_group
from torch import Tensor

Result = TypeVar("Result")


class TracedGroup(Group):
    """A group that stands for the ranks while a model is traced."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        out: Tensor = torch.ops.toolkit_lm.all_reduce(tensor, self.size)
        return out

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        out: Tensor = torch.ops.toolkit_lm.all_gather(tensor, dim % tensor.dim(), self.size)
        return out


def traced(parallel: ParallelConfig, trace: Callable[[], Result]) -> Result:
    """Runs `trace` with groups whose collectives are ops.

    It runs in its own thread, since a worker's real groups belong to the worker's thread.
    """
    if parallel.tensor_parallel_size == 1:
        return trace()

    def run() -> Result:
        with parallel_groups(
            tensor=TracedGroup(parallel.tensor_parallel_rank, parallel.tensor_parallel_size)
        ):
            return trace()

    with ThreadPoolExecutor(1, "toolkit_lm-trace") as thread:
        return thread.submit(run).result()


@cache
def _ranks(size: int) -> ParallelConfig:
    return ParallelConfig(tensor_parallel_size=size)


def _all_reduce(x: Tensor, size: int) -> Tensor:
    # An op's result must not alias its input, and a group may write there.
    return tensor_parallel_group(_ranks(size)).all_reduce(
        x.clone(memory_format=torch.contiguous_format)
    )


def _all_gather(x: Tensor, dim: int, size: int) -> Tensor:
    return tensor_parallel_group(_ranks(size)).all_gather(x.contiguous(), dim)


def _gathered(x: Tensor, dim: int, size: int) -> Tensor:
    return x.new_empty(
        [extent * size if place == dim else extent for place, extent in enumerate(x.shape)]
    )


_library: Any = torch.library.Library("toolkit_lm", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("all_reduce(Tensor x, int size) -> Tensor")
_library.impl("all_reduce", _all_reduce, "CompositeExplicitAutograd")
torch.library.register_fake(
    "toolkit_lm::all_reduce",
    lambda x, size: torch.empty_like(x, memory_format=torch.contiguous_format),
    lib=_library,
)
_library.define("all_gather(Tensor x, int dim, int size) -> Tensor")
_library.impl("all_gather", _all_gather, "CompositeExplicitAutograd")
torch.library.register_fake("toolkit_lm::all_gather", _gathered, lib=_library)
