"""Sources: a checkpoint's names of a model's modules. The model may pack or rename them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence


class Sources:
    """Made from the names of a checkpoint's tensors, during a model's construction. Each model in
    it adds its rules with `learn`."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = list(names)
        self._packed: dict[str, tuple[str, ...]] = {}
        self._by_name = {_module(name): _module(name) for name in self._names}
        """The checkpoint's name of a module, by the model's name."""
        self._tensors: dict[str, set[str]] = {}
        for name in self._names:
            module, _, tensor = name.rpartition(".")
            parent, _, child = module.rpartition(".")
            self._tensors.setdefault(module, set()).add(tensor)
            self._tensors.setdefault(parent, set()).add(f"{child}.{tensor}")

    def learn(
        self, prefix: str, packed: Mapping[str, tuple[str, ...]], renames: Sequence[tuple[str, str]]
    ) -> None:
        """Adds the rules of a model whose modules begin with `prefix`, as in `load_parameters`."""
        self._packed |= packed
        start = f"{prefix}." if prefix else ""
        for name in self._names:
            if not name.startswith(start):
                continue
            own = name.removeprefix(start)
            for pattern, replacement in renames:
                own = re.sub(pattern, replacement, own)
            self._by_name.setdefault(_module(start + own), _module(name))

    def of(self, prefix: str) -> tuple[str, ...]:
        """The checkpoint's names of a layer: one for each weight that it packs, or one for all.

        If the checkpoint has none of them, or is unknown: the model's own names.
        """
        if prefix in self._by_name:
            return (self._by_name[prefix],)
        path = prefix.split(".")
        for index, component in enumerate(path):
            if component in self._packed:
                parts = [
                    ".".join([*path[:index], part, *path[index + 1 :]])
                    for part in self._packed[component]
                ]
                return tuple(self._by_name.get(part, part) for part in parts)
        return (prefix,)

    def tensors(self, source: str) -> frozenset[str]:
        """Names of the checkpoint's tensors of a module, and of modules in it, without its own:
        "weight", "weight.absmax". Empty if there are none, or none is known."""
        return frozenset(self._tensors.get(source, ()))


def _module(name: str) -> str:
    """Name of a tensor's module: "a.b.weight" -> "a.b"."""
    return name.rpartition(".")[0]
