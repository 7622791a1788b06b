"""Registries of the code that computes a model: attention backends, kernels of layers,
compilers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from toolkit_lm.plugin.registry import Entry, Registry


class AttentionBackendRegistry(Registry[Entry]):
    """Attention backends, by name."""

    noun = "attention backend"
    base = "toolkit_lm.attention:AttentionBackend"

    def add(self, name: str, target: str, *, priority: int = 0, override: bool = False) -> None:
        """Registers a class. Among the classes that do not refuse a layer or a model, the one of
        the highest priority is selected."""
        self.add_entry(Entry, name, target, "module:Class", priority=priority, override=override)


class KernelsRegistry(AttentionBackendRegistry):
    """Kernels of layers, by name."""

    noun = "kernels"
    base = "toolkit_lm.model:Kernels"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerEntry(Entry):
    """A compiler class."""

    counter: str | None = None
    """"module:function" of a function () -> int. It counts the graphs compiled in this process so
    far, by this compiler or by others. The engine calls it after each step, even if nothing
    compiles the model."""


class CompilerRegistry(Registry[CompilerEntry]):
    """Compilers of models, by name."""

    noun = "compiler"
    base = "toolkit_lm.model:ModelCompiler"

    def add(
        self,
        name: str,
        target: str,
        *,
        counter: str | None = None,
        priority: int = 0,
        override: bool = False,
    ) -> None:
        """Registers a class. Among the classes that do not refuse a model, the one of the highest
        priority is selected.

        `counter`: "module:function" of a function () -> int, which counts the graphs compiled in
        this process so far. Its module imports nothing heavy.
        """
        self.add_entry(
            CompilerEntry,
            name,
            target,
            "module:Class",
            counter=counter,
            priority=priority,
            override=override,
        )

    def counters(self) -> list[Callable[[], int]]:
        """The counters of all compilers. Raises PluginError if one cannot be imported."""
        return [
            self.load_target(entry, entry.counter, "")
            for entry in self.entries()
            if entry.counter is not None
        ]
