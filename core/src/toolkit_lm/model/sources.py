"""Sources: what a checkpoint calls the modules of a model, which may pack or rename them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence


class Sources:
    """Made of the names of a checkpoint's tensors, while a model is constructed. Each model in it
    adds its rules with `learn`."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = list(names)
        self._packed: dict[str, tuple[str, ...]] = {}
        self._by_name = {_module(name): _module(name) for name in self._names}
        """By the model's name of a module, that of the checkpoint."""

    def learn(
        self, prefix: str, packed: Mapping[str, tuple[str, ...]], renames: Sequence[tuple[str, str]]
    ) -> None:
        """Takes in the rules of a model whose modules begin with `prefix`: as in
        `load_parameters`."""
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
        """The checkpoint's names of a layer: one for each weight that it packs, or one of all.

        Names of the model where the checkpoint has none of them, or is not known.
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


def _module(name: str) -> str:
    """Of a tensor: "a.b.weight" -> "a.b"."""
    return name.rpartition(".")[0]
