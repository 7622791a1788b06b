"""The executor contract: how the engine reaches its workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future

from msgspec import Raw

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.executor.calls import WorkerAnswer
from toolkit_lm.kv import KVCacheConfig, KVCacheSpec
from toolkit_lm.messages import StepPlan, StepResult
from toolkit_lm.plugin import Plugins


class Executor(ABC):
    """Runs one worker per device, all with the same plans. Methods are called from the engine's
    thread, in the order below.

    A worker's exception before the first step is raised by the method that caused it. If a worker
    dies, every unfinished and every later future fails with EngineDeadError. The error has the
    worker's last output, for instance its traceback.
    """

    max_in_flight: int = 1
    """Most steps that may be running at a time. If above 1, `execute` returns before the step has
    finished."""

    @abstractmethod
    def __init__(self, config: VllmConfig, plugins: Plugins) -> None:
        """`config` is resolved; `config.with_rank(rank)` is the config of a worker. Raises
        UnsupportedError for a config that the executor cannot run."""

    @abstractmethod
    def load(self) -> None:
        """Makes the model on every worker and loads its weights. Raises CheckpointError,
        PluginError, UnsupportedError."""

    @abstractmethod
    def kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """Cache specs by attention layer, per rank. A pipeline rank has only its own layers."""

    @abstractmethod
    def backends(self) -> dict[str, str]:
        """Name of each attention layer's backend, by layer, for all workers."""

    @abstractmethod
    def part_facts(self) -> dict[str, Raw]:
        """Facts from `StepPart.facts`, by part, of the first worker that has the part."""

    @abstractmethod
    def free_memory(self) -> int:
        """Free bytes of each worker's device, after those that `profile` measures for a step. If
        workers differ: the least."""

    @abstractmethod
    def free_host_memory(self) -> int:
        """Free bytes of host memory per worker. If workers differ: the least."""

    @abstractmethod
    def init_kv_cache(self, kv_caches: Sequence[KVCacheConfig]) -> None:
        """Allocates the KV cache on every worker, by the config of its rank. All configs have the
        same groups, each with the rank's layers."""

    @abstractmethod
    def warm_up(self) -> None:
        """Runs what the first request would otherwise wait for. Also called after a failed step, to
        test whether a loaded engine still works.

        No block of the cache is in use at that time, and the contents of free blocks are not relied
        on.
        """

    @abstractmethod
    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """Starts a step. Steps run in the order of the calls.

        The future gets a worker's exception, with its traceback. With several workers, a note says
        "on rank 1".
        """

    def call(self, method: str, payload: Raw) -> Future[list[WorkerAnswer]]:
        """Has every rank call a method of its parts or model, with `call_worker`, after the steps
        that were started before. What each answers, in the order of ranks.

        What a method raises is in the rank's answer, and fails no step. By default it is refused,
        with UnsupportedError.
        """
        raise UnsupportedError(
            f"{method}: the executor {type(self).__name__} carries no calls to its workers."
        )

    def check(self) -> None:  # noqa: B027
        """Raises EngineDeadError if a worker has died. An idle engine process calls this once a
        second, since no step would report it."""

    def dump_stacks(self) -> None:  # noqa: B027
        """Makes workers in other processes write the stacks of their threads to stderr. May be
        called from any thread, and from a signal handler."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the workers and releases their memory. Safe to call twice."""


def make_executor(config: VllmConfig, plugins: Plugins) -> Executor:
    """Makes the executor that a resolved config names. Raises PluginError if it cannot be
    loaded."""
    made: Executor = plugins.executors.make(config.parallel.executor, config, plugins)
    return made
