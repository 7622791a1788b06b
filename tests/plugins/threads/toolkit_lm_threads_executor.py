"""An executor whose workers are threads of the engine's process: tensor x pipeline parallel size of
them."""

import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any

import torch
from msgspec import Raw
from toolkit_lm.config import VllmConfig
from toolkit_lm.distributed import Group, parallel_groups
from toolkit_lm.errors import EngineDeadError
from toolkit_lm.executor import Executor, WorkerAnswer, call_worker
from toolkit_lm.kv import KVCacheConfig, KVCacheSpec
from toolkit_lm.messages import StepPlan, StepResult
from toolkit_lm.plugin import Plugins
from toolkit_lm.runner import ModelRunner, free_memory, profile, warm_up
from torch import Tensor


class Meeting:
    """Barrier at which the ranks of a group meet. After it is aborted, every rank that comes or
    waits fails."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.tensors = [torch.empty(0)] * size
        self.mail = {
            (source, target): SimpleQueue[Any]() for source in range(size) for target in range(size)
        }


class ThreadGroup(Group):
    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank = rank
        self.size = meeting.barrier.parties
        self.meeting = meeting

    def _exchange(self, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        self.meeting.tensors[self.rank] = tensor
        self.meeting.barrier.wait()
        combined = combine(self.meeting.tensors)
        # Nobody goes on, and writes, before all have read.
        self.meeting.barrier.wait()
        return combined

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._exchange(tensor, lambda tensors: torch.stack(tensors).sum(0))

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return self._exchange(tensor, lambda tensors: torch.cat(tensors, dim))

    def send(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        self.meeting.mail[self.rank, rank].put(dict(tensors))

    def recv(self, rank: int) -> dict[str, Tensor]:
        if (tensors := self.meeting.mail[rank, self.rank].get()) is None:
            raise threading.BrokenBarrierError
        return dict(tensors)


class ThreadsExecutor(Executor):
    def __init__(self, config: VllmConfig, plugins: Plugins) -> None:
        self.parallel = config.parallel
        self.max_in_flight = max(
            self.parallel.pipeline_parallel_size, 2 if config.engine.overlap else 1
        )
        self.runners = [
            ModelRunner(config.with_rank(rank), plugins) for rank in range(self.parallel.num_ranks)
        ]
        self._threads = [
            ThreadPoolExecutor(1, f"rank-{rank}") for rank in range(self.parallel.num_ranks)
        ]
        self._collector = ThreadPoolExecutor(1, "results")
        self._death: EngineDeadError | None = None
        self._connect()

    def _connect(self) -> None:
        """Gives the ranks new places to meet, where nothing of a failed step waits."""
        tensor = self.parallel.tensor_parallel_size
        pipeline = self.parallel.pipeline_parallel_size
        stages = [Meeting(tensor) for _ in range(pipeline)]
        shards = [Meeting(pipeline) for _ in range(tensor)]
        self._groups = [
            (ThreadGroup(j, stages[i]), ThreadGroup(i, shards[j]))
            for i in range(pipeline)
            for j in range(tensor)
        ]
        self._failed = False

    def _start(self, call: Callable[[ModelRunner], Any]) -> list[Future[Any]]:
        """Has every rank make a call of its runner."""
        if self._failed:
            self._connect()
        ranks = zip(self._threads, self.runners, self._groups, strict=True)
        return [thread.submit(self._run, call, *rank) for thread, *rank in ranks]

    def _run(
        self,
        call: Callable[[ModelRunner], Any],
        runner: ModelRunner,
        groups: tuple[ThreadGroup, ThreadGroup],
    ) -> Any:
        try:
            with parallel_groups(tensor=groups[0], pipeline=groups[1]):
                return call(runner)
        except BaseException:
            self._abort(groups)
            raise

    def _abort(self, groups: Sequence[ThreadGroup]) -> None:
        for meeting in (group.meeting for group in groups):
            meeting.barrier.abort()
            for box in meeting.mail.values():
                box.put(None)

    def _collect(self, futures: Sequence[Future[Any]]) -> list[Any]:
        """Results of the ranks. Raises the error of the first rank that failed."""
        wait(futures)
        if self._death is not None:
            raise self._death
        errors = [
            (rank, error)
            for rank, future in enumerate(futures)
            if (error := future.exception()) is not None
        ]
        if not errors:
            return [future.result() for future in futures]
        self._failed = True
        # The one that is to blame: who died before who failed, and both before those who waited for
        # it.
        rank, error = min(
            errors,
            key=lambda one: (
                isinstance(one[1], Exception),
                isinstance(one[1], threading.BrokenBarrierError),
            ),
        )
        if isinstance(error, Exception):
            error.add_note(f"on rank {rank}")
            raise error
        self._death = EngineDeadError(
            f"the worker of rank {rank} has died: {type(error).__name__}: {error}"
        )
        self._death.add_note("".join(traceback.format_exception(error)))
        raise self._death from error

    def load(self) -> None:
        self._collect(self._start(ModelRunner.load))
        self._step_memory = max(self._collect(self._start(profile)))

    def kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        return self._collect(self._start(ModelRunner.kv_cache_specs))

    def backends(self) -> dict[str, str]:
        return {
            layer: one.name
            for runner in reversed(self.runners)
            for layer, one in runner.selections.items()
        }

    def part_facts(self) -> dict[str, Raw]:
        return {
            name: raw
            for runner in reversed(self.runners)
            for name, raw in runner.parts.facts().items()
        }

    def free_memory(self) -> int:
        return free_memory(self.runners[0].device) // len(self.runners) - self._step_memory

    def free_host_memory(self) -> int:
        return free_memory(torch.device("cpu")) // len(self.runners)

    def init_kv_cache(self, kv_caches: Sequence[KVCacheConfig]) -> None:
        of_runner = dict(zip(self.runners, kv_caches, strict=True))
        self._collect(self._start(lambda runner: runner.init_kv_cache(of_runner[runner])))

    def warm_up(self) -> None:
        self._collect(self._start(warm_up))

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        futures = self._start(lambda runner: runner.execute(plan))
        return self._collector.submit(lambda: self._collect(futures)[-1])

    def call(self, method: str, payload: Raw) -> Future[list[WorkerAnswer]]:
        futures = [
            thread.submit(call_worker, runner, method, payload)
            for thread, runner in zip(self._threads, self.runners, strict=True)
        ]
        return self._collector.submit(lambda: [future.result() for future in futures])

    def shutdown(self) -> None:
        self._abort(sum(self._groups, ()))
        for one in (*self._threads, self._collector, *self.runners):
            one.shutdown()
