"""Tensor parallel ranks that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from toolkit_lm.distributed import Group, parallel_groups
from torch import Tensor

T = TypeVar("T")

_PATIENCE = 60
"""Seconds that a rank waits for the others."""


class ThreadGroup(Group):
    """Each rank lays down its tensor, and all add or join them in the same order."""

    def __init__(self, rank: int, board: list[Tensor | None], barrier: threading.Barrier) -> None:
        """`board` and `barrier` are those of all ranks."""
        self.rank = rank
        self.size = len(board)
        self._board = board
        self._barrier = barrier

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._laid(tensor)).sum(0)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat(self._laid(tensor), dim)

    def _laid(self, tensor: Tensor) -> list[Tensor]:
        self._board[self.rank] = tensor
        self._barrier.wait(_PATIENCE)
        laid = [entry for entry in self._board if entry is not None]
        self._barrier.wait(_PATIENCE)
        return laid


def run_ranks(work: Callable[[int], T], ranks: int = 2) -> list[T]:
    """Results of `work(rank)` on each rank, in threads that form one tensor parallel group. Raises
    the error of a rank that fails."""
    board: list[Tensor | None] = [None] * ranks
    barrier = threading.Barrier(ranks)

    def run(rank: int) -> T:
        try:
            with parallel_groups(tensor=ThreadGroup(rank, board, barrier)):
                return work(rank)
        except threading.BrokenBarrierError:
            raise
        except BaseException:
            # The others are not to wait for it.
            barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as threads:
        futures = [threads.submit(run, rank) for rank in range(ranks)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(
        errors, key=lambda failure: isinstance(failure, threading.BrokenBarrierError)
    ):
        raise error
    return [future.result() for future in futures]
