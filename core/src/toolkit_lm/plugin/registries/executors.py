"""How an engine reaches its workers, and a front its engines."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit_lm.plugin.registry import Entry, PlainRegistry, Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorEntry(Entry):
    """An executor class."""

    max_ranks: int | None = None
    """Most workers that it runs; None: any number."""
    runs_nodes: bool = False
    """True: its workers can be on several machines."""


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

        `max_ranks`: most workers that it runs; None: any number. `runs_nodes`: they can be on
        several machines.
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
    """What starts the engines of a front in a way of its own, by name.

    A target is a function (config, plugins) -> toolkit_lm.engine.EngineClient | None. Its module
    imports no torch. `config` is resolved, but for the device; `plugins` is the loaded set. None:
    such a config is not its own.
    """

    noun = "engine client"
