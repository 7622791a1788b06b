"""Finds the layer that a tensor of an adapter belongs to. PEFT names modules as transformers does,
which may be neither the checkpoint's names nor the model's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from toolkit_lm.model import Absent, LinearBase, Model, Rows
from torch import nn

_PARTS = ("model", "language_model", "vision_model")
"""Modules that hold parts of a model of media, and that versions of transformers nest in different
ways."""


class Place(NamedTuple):
    """A weight of a layer."""

    layer: LinearBase
    part: int | None
    """Index of the output part that it is; None: the weight of the whole layer."""


class Names:
    """Layers of this rank's model by the names that adapters may give them."""

    def __init__(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        self._places: dict[str, Place] = {}
        self._split: dict[str, Place] = {}
        """Parts of layers whose weight the checkpoint has as one, by the names of parts."""
        self._packed = {
            own: parts
            for module in modules.values()
            if isinstance(module, Model)
            for own, parts in module.packed.items()
        }
        self.modules: dict[str, nn.Module] = {}
        """Other modules than linear layers, with parameters of their own, by their names: norms,
        heads."""
        self._renames = [
            rename
            for path, module in modules.items()
            if isinstance(module, Model)
            for rename in module.renames
        ]
        self._is_composed = isinstance(modules.get("language_model"), Model)
        self._absent = [path for path, module in modules.items() if isinstance(module, Absent)]
        self.experts: dict[str, dict[int, list[LinearBase]]] = {}
        """Layers of each expert of a module, by its name: gate and up, then down."""
        for path, module in modules.items():
            if isinstance(module, LinearBase):
                self._add(path, module)
            elif next(module.parameters(recurse=False), None) is not None:
                self.modules[path] = module
        self._by_tail: dict[tuple[str, str], set[str]] = {}
        for name in [*self._places, *self.experts, *self.modules]:
            self._by_tail.setdefault(_tail(name), set()).add(name)

    def _add(self, path: str, layer: LinearBase) -> None:
        sources = layer.spec.sources
        found = re.match(r"(.*)\.(\d+)\.[^.]+$", layer.prefix)
        if layer.spec.kind == "experts" and found is not None:
            of = self.experts.setdefault(found[1], {}).setdefault(int(found[2]), [])
            of.insert(0 if len(layer.spec.outputs) > 1 else len(of), layer)
        names = {path: None, layer.prefix: None}
        parent, _, own = layer.prefix.rpartition(".")
        if len(sources) == 1:
            names[sources[0]] = None
            parts = self._packed.get(own, ())
            if len(parts) == len(layer.spec.outputs) > 1:
                for part, last in enumerate(parts):
                    name = f"{parent}.{last}" if parent else last
                    self._split.setdefault(name, Place(layer, part))
        else:
            for part, source in enumerate(sources):
                last = source.rpartition(".")[2]
                for name in (source, f"{parent}.{last}" if parent else last):
                    self._places.setdefault(name, Place(layer, part))
        for name in names:
            self._places.setdefault(name, Place(layer, None))

    def place(self, name: str) -> Place | None:
        """The place of a module of that name; None: there is none here."""
        for places in (self._places, self._split):
            if (known := self._known(name, places)) is not None:
                return places[known]
        return None

    def experts_of(self, name: str) -> dict[int, list[LinearBase]] | None:
        """The experts of a module of that name, as far as this rank holds them."""
        known = self._known(name, self.experts)
        return None if known is None else self.experts[known]

    def module(self, name: str) -> nn.Module | None:
        """The module of that name, other than a linear layer."""
        known = self._known(name, self.modules)
        if known is None:
            # A head, which the class may keep elsewhere than the checkpoint.
            own = f"{name}."
            for pattern, replacement in self._renames:
                own = re.sub(pattern, replacement, own)
            known = self._known(own.rstrip("."), self.modules)
        return None if known is None else self.modules[known]

    def is_elsewhere(self, name: str) -> bool:
        """Whether another rank may have the module of that name."""
        dotted = f".{name}."
        return any(f".{'.'.join(path.split('.')[-2:])}." in dotted for path in self._absent)

    def linear(self) -> Iterable[str]:
        """Names of all linear layers' weights."""
        return self._places

    def _known(self, name: str, among: Iterable[str]) -> str | None:
        if name in among:
            return name
        # The model's own base class has no "model." or "bert." before its names.
        longer = [
            known for known in among if known.endswith(f".{name}") or name.endswith(f".{known}")
        ]
        if len({*longer}) == 1:
            return longer[0]
        if (bare := self._bare(name, among)) is not None:
            return bare
        # Checkpoints and transformers have different names for the module around experts.
        alike = [
            known
            for known in self._by_tail.get(_tail(name), ())
            if known in among
            and (known in self.experts or f"{known.rpartition('.')[0]}.experts" in self.experts)
        ]
        return alike[0] if len(alike) == 1 else None

    def _bare(self, name: str, among: Iterable[str]) -> str | None:
        """The one module of a model of media with that name, whatever its parts are in. None: there
        is none, or several."""
        wanted = _without_parts(name)
        alike: dict[Place | str, str] = {}
        for known in among if self._is_composed else ():
            own = _without_parts(known)
            if wanted in (own, own.removeprefix("encoder.")):
                alike.setdefault(self._places.get(known, known), known)
        return next(iter(alike.values())) if len(alike) == 1 else None

    def is_unused(self, name: str) -> bool:
        """Whether a module is of a layer of an encoder that the model leaves out: one after those
        whose states it takes."""
        found = re.fullmatch(r"(.*\.)(\d+)(\..*)", name)
        if found is None or not self._is_composed:
            return False
        first = self._known(f"{found[1]}0{found[3]}", [*self._places, *self.modules])
        return first is not None and (
            first not in self._places or self._places[first].layer.rows is Rows.ENCODER
        )


def _without_parts(name: str) -> str:
    """A name without the modules that hold parts of a model of media."""
    return ".".join(part for part in name.split(".") if part not in _PARTS)


def _tail(name: str) -> tuple[str, str]:
    """Common parts of the names of one module: up to the layer's number, and the last part."""
    head = re.match(r".*?\.\d+\.", name)
    return (head[0] if head else "", name.rpartition(".")[2]) if head else ("", name)
