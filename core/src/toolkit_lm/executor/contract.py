"""The executor contract: how the engine reaches its workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future

from msgspec import Raw

from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import KVCacheConfig, KVCacheSpec
from toolkit_lm.messages import StepPlan, StepResult
from toolkit_lm.plugin import Plugins


class Executor(ABC):
    """One worker per device, all of them running the same plans. Methods are called from the
    engine's thread, in the order below.

    What a worker raises before the first step is raised by the method that asked for it. Where a
    worker dies, every future that is not done and every later one fails with EngineDeadError, which
    holds the worker's last words, its traceback for instance.
    """

    max_in_flight: int = 1
    """Most steps that are on their way at a time. More than one: `execute` returns before the step
    is over."""

    @abstractmethod
    def __init__(self, config: VllmConfig, plugins: Plugins) -> None:
        """`config` is resolved; that of each worker is `config.with_rank(rank)`. Raises
        UnsupportedError for what it cannot run."""

    @abstractmethod
    def load(self) -> None:
        """Makes the model on every worker and loads its weights. Raises CheckpointError,
        PluginError, UnsupportedError."""

    @abstractmethod
    def kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """Per rank, by attention layer: what it caches. A pipeline rank has its own layers only."""

    @abstractmethod
    def backends(self) -> dict[str, str]:
        """By attention layer, of all workers: the name of its backend."""

    @abstractmethod
    def part_facts(self) -> dict[str, Raw]:
        """By part, what `StepPart.facts` says: of the first worker that has it."""

    @abstractmethod
    def free_memory(self) -> int:
        """Bytes that each worker's device has to spare, after what `profile` says that a step
        takes; the least, where they differ."""

    @abstractmethod
    def free_host_memory(self) -> int:
        """Bytes of host memory that each worker can have; the least, where they differ."""

    @abstractmethod
    def init_kv_cache(self, kv_caches: Sequence[KVCacheConfig]) -> None:
        """Allocates the KV cache on every worker, as the one of its rank says. All have the same
        groups, each with the rank's layers."""

    @abstractmethod
    def warm_up(self) -> None:
        """Runs what the first request would otherwise wait for. Also asked of a loaded engine when
        a step has failed: does it still work?

        No block of the cache is in use at that time, and what free blocks hold is not relied on.
        """

    @abstractmethod
    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """Starts a step. Steps run in the order of the calls.

        What a step raises on a worker is in its future, with its traceback; where there are several
        workers, a note says "on rank 1".
        """

    def check(self) -> None:  # noqa: B027
        """Raises EngineDeadError where a worker has died. An engine process without work asks once
        a second: it is told by no step."""

    def dump_stacks(self) -> None:  # noqa: B027
        """Has workers in other processes write the stacks of their threads to stderr. From any
        thread, and from a signal's handler."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the workers and releases their memory. Safe to call twice."""


def make_executor(config: VllmConfig, plugins: Plugins) -> Executor:
    """The executor that a resolved config names. Raises PluginError where it cannot be loaded."""
    made: Executor = plugins.executors.make(config.parallel.executor, config, plugins)
    return made
