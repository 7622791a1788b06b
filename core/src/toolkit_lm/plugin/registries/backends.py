"""What computes a model: attention backends, kernels of layers, compilers."""

from __future__ import annotations

from toolkit_lm.plugin.registry import Entry, Registry


class AttentionBackendRegistry(Registry[Entry]):
    """Attention backends, by name."""

    noun = "attention backend"
    base = "toolkit_lm.attention:AttentionBackend"

    def add(self, name: str, target: str, *, priority: int = 0, override: bool = False) -> None:
        """Registers a class. Of those that do not refuse, the one of the highest priority is
        chosen: for each layer, or each model."""
        self.add_entry(Entry, name, target, "module:Class", priority=priority, override=override)


class KernelsRegistry(AttentionBackendRegistry):
    """Kernels of layers, by name."""

    noun = "kernels"
    base = "toolkit_lm.model:Kernels"


class CompilerRegistry(AttentionBackendRegistry):
    """Compilers of models, by name."""

    noun = "compiler"
    base = "toolkit_lm.model:ModelCompiler"
