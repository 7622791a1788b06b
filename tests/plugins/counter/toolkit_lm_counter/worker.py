"""The workers' halves."""

from __future__ import annotations

import threading
from typing import Any

from msgspec import Raw, Struct
from toolkit_lm.distributed import tensor_parallel_group
from toolkit_lm.messages import StepPlan
from toolkit_lm.step import StepPart, StepRun, worker_method


class Counted(Struct):
    """Tokens that a rank has computed."""

    rank: int
    num_tokens: int
    between_steps: bool
    """It is asked in the thread that computes steps, while none runs."""


class CounterPart(StepPart):
    """On every rank."""

    def __init__(self, *arguments: Any, **given: Any) -> None:
        super().__init__(*arguments, **given)
        self.num_tokens = 0
        self.thread: int | None = None

    def begin(self, plan: StepPlan, step: StepRun) -> Raw | None:
        self.num_tokens += plan.num_tokens
        self.thread = threading.get_ident()
        return None

    @worker_method
    def count(self) -> Counted:
        between = self.thread == threading.get_ident()
        return Counted(self.config.parallel.rank, self.num_tokens, between)

    @worker_method
    def reset(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    @worker_method
    def fail(self, rank: int) -> int:
        if rank in (-1, self.config.parallel.rank):
            raise ZeroDivisionError("as it was told")
        return rank

    @worker_method
    def gather(self) -> int:
        return tensor_parallel_group(self.config.parallel).size

    @worker_method
    def boast(self, size: int) -> str:
        return "x" * size

    @worker_method
    def confuse(self) -> object:
        return object()

    def secret(self) -> None:
        raise AssertionError("nobody has marked it")


class LastPart(StepPart):
    """On the last pipeline stage alone."""

    ranks = "last_stage"

    @worker_method
    def stage(self) -> int:
        return self.config.parallel.pipeline_parallel_rank
