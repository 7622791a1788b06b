"""The executor whose workers are processes of this machine, or of several: tensor x pipeline
parallel size of them."""

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
from toolkit_lm.executor import Executor
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
"""What plugins register that no worker needs."""


class MpExecutor(Executor):
    """Every worker takes every plan; the first rank of the last pipeline stage answers."""

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
        """When the workers must be ready."""
        _check_plugins(plugins)
        self.link = self.make_link()
        # Whoever makes an engine may fail before there is one to shut down.
        self._finalizer = weakref.finalize(self, self.link.end)

    def make_link(self) -> Link:
        """Starts the workers, or has them started. Raises ConfigError, EngineDeadError,
        UnsupportedError."""
        _check_devices(self.config)
        return Link(self.config)

    @property
    def pids(self) -> list[int]:
        """Of the workers' processes on this machine, by rank."""
        return [process.pid for process in self.link.processes]

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """What fails at the start ends the workers."""
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
        """What all ranks answer, in the order of ranks."""
        if self.link.has_failed:
            self.link.connect()
        done: list[Any] = self.link.answers(self.link.call(command, doing), self._end)
        return done

    def kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        return [
            {layer: self._spec(raw) for layer, raw in one.specs.items()}
            for one in self._descriptions
        ]

    def _spec(self, raw: msgspec.Raw) -> KVCacheSpec:
        plain: Any = msgspec.msgpack.decode(raw)
        spec: KVCacheSpec = msgspec.convert(plain, self._plugins.kv_kinds.load(plain["kind"]))
        return spec

    def backends(self) -> dict[str, str]:
        return {layer: name for one in self._descriptions for layer, name in one.backends.items()}

    def part_facts(self) -> dict[str, msgspec.Raw]:
        return {
            name: facts for one in reversed(self._descriptions) for name, facts in one.parts.items()
        }

    def free_memory(self) -> int:
        step_memory = max(one.step_memory for one in self._descriptions)
        sharing = (
            1 if self.config.device.device.startswith("cuda") else self.parallel.ranks_per_node
        )
        return min(one.free_memory for one in self._descriptions) // sharing - step_memory

    def free_host_memory(self) -> int:
        return (
            min(one.free_host_memory for one in self._descriptions) // self.parallel.ranks_per_node
        )

    def init_kv_cache(self, kv_caches: Sequence[KVCacheConfig]) -> None:
        with self._starting():
            self._ask(
                wire.InitKVCache([msgspec.Raw(wire.encode(one)) for one in kv_caches]),
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
        needed = [f"{mark}{what}" for _, mark, what in registers if mark and what not in _OF_ENGINE]
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
            "--device cuda, and choose the GPUs by "
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
