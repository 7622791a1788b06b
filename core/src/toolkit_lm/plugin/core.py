"""Core's own entries: an executor, kernels, KV kinds and scheduling policies. They are registered
through the same hooks as a plugin's."""

from __future__ import annotations

from toolkit_lm.plugin import (
    ExecutorRegistry,
    KernelsRegistry,
    KVKindRegistry,
    KVTierRegistry,
    SchedulingPolicyRegistry,
    hookimpl,
)


@hookimpl
def toolkit_register_executors(executors: ExecutorRegistry) -> None:
    executors.add("in_process", "toolkit_lm.executor.in_process:InProcessExecutor", max_ranks=1)


@hookimpl
def toolkit_register_kernels(kernels: KernelsRegistry) -> None:
    kernels.add("torch", "toolkit_lm.model.kernels:Kernels")


@hookimpl
def toolkit_register_kv_kinds(kv_kinds: KVKindRegistry) -> None:
    kv_kinds.add("full", "toolkit_lm.kv.spec:FullSpec")
    kv_kinds.add("cross", "toolkit_lm.kv.spec:CrossSpec")
    kv_kinds.add("window", "toolkit_lm.kv.spec:WindowSpec")


@hookimpl
def toolkit_register_kv_tiers(kv_tiers: KVTierRegistry) -> None:
    kv_tiers.add("host", "toolkit_lm.kv.host:HostStore")


@hookimpl
def toolkit_register_scheduling_policies(policies: SchedulingPolicyRegistry) -> None:
    policies.add("fcfs", "toolkit_lm.scheduler.roster:SchedulingPolicy")
    policies.add("priority", "toolkit_lm.scheduler.roster:priority", reads_priority=True)
