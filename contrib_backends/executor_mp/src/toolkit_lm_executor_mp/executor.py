"""The executor that runs one worker process per rank, on this machine or on several nodes."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import PluginError, UnsupportedError
from toolkit_lm.executor import Executor, WorkerAnswer
from toolkit_lm.kv import KVCacheConfig, KVCacheSpec
from toolkit_lm.messages import StepPlan, StepResult
from toolkit_lm.plugin import Plugins

from toolkit_lm_executor_mp import wire
from toolkit_lm_executor_mp.link import Link
from toolkit_lm_executor_mp.wire import answering_rank

_OF_ENGINE = {
    "executors",
    "scheduling_policies",
    "renderers",
    "commands",
    "hookspecs",
    "checkpoints",
}
"""Kinds of plugin registrations that no worker needs."""


class MpExecutor(Executor):
    """An executor that sends each step to all workers. The first rank of the last pipeline stage
    answers."""

    def __init__(self, config: VllmConfig, plugins: Plugins) -> None:
        self.config = config
        self.parallel = config.parallel
        self.max_in_flight = max(
            self.parallel.pipeline_parallel_size, 2 if config.engine.overlap else 1
        )
        self._plugins = plugins
        self._answering = answering_rank(self.parallel)
        self._num_steps = 0
        self._descriptions: list[wire.Description] = []
        self._end: float | None = time.monotonic() + config.engine.start_timeout
        """Value of time.monotonic() by which the workers must be ready. None: they have warmed
        up."""
        _check_plugins(plugins)
        self.link = self.make_link()
        # Whoever makes an engine may fail before there is one to shut down.
        self._finalizer = weakref.finalize(self, self.link.end)

    def make_link(self) -> Link:
        """Starts the workers, or has their nodes start them.

        Raises ConfigError, EngineDeadError, UnsupportedError.
        """
        _check_devices(self.config)
        return Link(self.config)

    @property
    def pids(self) -> list[int]:
        """PIDs of the worker processes on this machine, in the order of ranks."""
        return [process.pid for process in self.link.processes]

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """Context of the start-up calls. A failure inside it shuts the workers down."""
        try:
            yield
        except BaseException as error:
            self.link.reason = str(error)
            self.shutdown()
            raise

    def load(self) -> None:
        names = {info.name for info in self._plugins.infos if info.distribution is None}
        options = {
            name: values
            for name, values in self.config.plugins.plugin_option.items()
            if name not in names
        }
        config = replace(self.config, plugins=replace(self.config.plugins, plugin_option=options))
        assert self._end is not None, "it is loaded once"
        with self._starting():
            self.link.start(
                wire.Start(config, self._plugins.fingerprint(installed=True)), self._end
            )
            self._ask(wire.Load(), "while loading the model")
            self._descriptions = [
                done.description for done in self._ask(wire.Describe(), "while loading the model")
            ]

    def _ask(self, command: wire.Command, doing: str) -> list[Any]:
        """Sends a command to all ranks and returns their answers, in the order of ranks."""
        if self.link.has_failed:
            self.link.connect()
        done: list[Any] = self.link.answers(self.link.call(command, doing), self._end)
        return done

    def kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        return [
            {layer: self._spec(raw) for layer, raw in description.specs.items()}
            for description in self._descriptions
        ]

    def _spec(self, raw: msgspec.Raw) -> KVCacheSpec:
        plain: Any = msgspec.msgpack.decode(raw)
        spec: KVCacheSpec = msgspec.convert(plain, self._plugins.kv_kinds.load(plain["kind"]))
        return spec

    def backends(self) -> dict[str, str]:
        return {
            layer: name
            for description in self._descriptions
            for layer, name in description.backends.items()
        }

    def part_facts(self) -> dict[str, msgspec.Raw]:
        return {
            name: facts
            for description in reversed(self._descriptions)
            for name, facts in description.parts.items()
        }

    def free_memory(self) -> int:
        step_memory = max(description.step_memory for description in self._descriptions)
        sharing = (
            1 if self.config.device.device.startswith("cuda") else self.parallel.ranks_per_node
        )
        return (
            min(description.free_memory for description in self._descriptions) // sharing
            - step_memory
        )

    def free_host_memory(self) -> int:
        return (
            min(description.free_host_memory for description in self._descriptions)
            // self.parallel.ranks_per_node
        )

    def init_kv_cache(self, kv_caches: Sequence[KVCacheConfig]) -> None:
        with self._starting():
            self._ask(
                wire.InitKVCache([msgspec.Raw(wire.encode(kv_cache)) for kv_cache in kv_caches]),
                "while allocating the KV cache",
            )

    def warm_up(self) -> None:
        if self._num_steps:
            self._ask(wire.WarmUp(), "while warming up")
            return
        with self._starting():
            self._ask(wire.WarmUp(), "while warming up")
        # From now on, nothing takes the time that a start does.
        self._end = None

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        if self.link.has_failed:
            self.link.connect()
        self._num_steps += 1
        return self.link.call(
            wire.Step(plan),
            f"in step {self._num_steps}",
            [self._answering],
            lambda done: done[0].result,
        ).future

    def call(self, method: str, payload: msgspec.Raw) -> Future[list[WorkerAnswer]]:
        if self.link.has_failed:
            self.link.connect()
        return self.link.call(
            wire.CallMethod(method, payload),
            f"in {method}",
            combine=lambda done: [report.answer for report in done],
        ).future

    def check(self) -> None:
        self.link.check()

    def dump_stacks(self) -> None:
        # Before they are loaded, the signal may come before they have imported what takes it.
        for process in self.link.processes if self._descriptions else ():
            process.dump_stacks()

    def shutdown(self) -> None:
        self._finalizer()


def _check_plugins(plugins: Plugins) -> None:
    for info in plugins.infos:
        registers = [hook.partition("toolkit_register_") for hook in info.hooks]
        needed = [
            f"{mark}{registry}"
            for _, mark, registry in registers
            if mark and registry not in _OF_ENGINE
        ]
        if info.distribution is None and info.status == "ok" and needed:
            raise PluginError(
                f"{info} implements {', '.join(needed)}, which the workers need too, but an "
                "object is known to this process only. "
                "Install it as a distribution with an entry point."
            )


def _check_devices(config: VllmConfig) -> None:
    parallel = config.parallel
    device = torch.device(config.device.device)
    if device.type == "cuda" and device.index is not None:
        raise UnsupportedError(
            f"device {config.device.device!r} is one device, and each worker takes its own: give "
            "device='cuda', and choose the GPUs by "
            "CUDA_VISIBLE_DEVICES."
        )
    if (
        device.type == "cuda"
        and (num_devices := torch.cuda.device_count()) < parallel.ranks_per_node
    ):
        over = f" over {parallel.nodes} nodes" if parallel.nodes > 1 else ""
        raise UnsupportedError(
            f"tensor_parallel_size {parallel.tensor_parallel_size} x pipeline_parallel_size "
            f"{parallel.pipeline_parallel_size}{over} "
            f"needs {parallel.ranks_per_node} GPUs, one per rank: there are {num_devices}."
        )
