"""Registries of executors, scheduling policies, kinds of KV cache, and engine clients."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit_lm.plugin.registry import Entry, PlainRegistry, Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorEntry(Entry):
    """An executor class."""

    max_ranks: int | None = None
    """Most workers that the executor runs; None: any number."""
    runs_nodes: bool = False
    """True: the workers can be on several machines."""


class ExecutorRegistry(Registry[ExecutorEntry]):
    """Executors, by name."""

    noun = "executor"
    base = "toolkit_lm.executor:Executor"

    def add(
        self,
        name: str,
        target: str,
        *,
        max_ranks: int | None = None,
        runs_nodes: bool = False,
        override: bool = False,
    ) -> None:
        """Registers a subclass of toolkit_lm.executor.Executor.

        `max_ranks`: most workers that it runs; None: any number. `runs_nodes`: the workers can be
        on several machines.
        """
        self.add_entry(
            ExecutorEntry,
            name,
            target,
            "module:Class",
            max_ranks=max_ranks,
            runs_nodes=runs_nodes,
            override=override,
        )


class EngineClientRegistry(PlainRegistry):
    """Functions that start a front's engine in their own way, by name.

    A target is a function (config, plugins) -> toolkit_lm.engine.EngineClient | None. Its module
    imports no torch. `config` is resolved except for the device; `plugins` is the loaded set. None:
    the function does not handle such a config.
    """

    noun = "engine client"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingPolicyEntry(Entry):
    """A scheduling policy: a function, or a class."""

    reads_priority: bool = False
    """True: the policy reads the priority of requests."""


class SchedulingPolicyRegistry(Registry[SchedulingPolicyEntry]):
    """Scheduling policies, by the name that the option scheduling_policy gives."""

    noun = "scheduling policy"

    def add(
        self, name: str, target: str, *, reads_priority: bool = False, override: bool = False
    ) -> None:
        """Registers a subclass of toolkit_lm.scheduler.SchedulingPolicy, or a function that is its
        `key`.

        `reads_priority`: the policy reads the priority of requests.
        """
        self.add_entry(
            SchedulingPolicyEntry,
            name,
            target,
            "module:function",
            reads_priority=reads_priority,
            override=override,
        )


class KVKindRegistry(PlainRegistry):
    """Subclasses of toolkit_lm.kv.KVCacheSpec, by their tags. Their modules import no torch."""

    noun = "KV kind"
    base = "toolkit_lm.kv:KVCacheSpec"
