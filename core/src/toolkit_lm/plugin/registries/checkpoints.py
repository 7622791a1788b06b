"""Registries of checkpoints inside packages, and of classes that load and unpack weights."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from fnmatch import filter
from pathlib import Path

from toolkit_lm.errors import CheckpointError
from toolkit_lm.plugin.registry import Entry, PlainRegistry, Registry


class CheckpointRegistry(Registry[Entry]):
    """Checkpoint folders inside packages, by the name that MODEL may give."""

    noun = "checkpoint"
    pattern = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[\w-]+(/[\w-]+)*")

    def add(self, name: str, folder: str, *, override: bool = False) -> None:
        """Registers a folder, as "package:folder/inside/it"."""
        self.add_entry(Entry, name, folder, "package:folder", override=override)

    def path(self, name: str) -> Path:
        """Path of a registered checkpoint. Raises CheckpointError if it does not exist."""
        entry = self.get(name)
        package, _, folder = entry.target.partition(":")
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations if spec else None) or ():
            if (path := Path(root, folder)).is_dir():
                return path
        raise CheckpointError(
            f"{entry.owner}: checkpoint {name!r} is registered, but there is no folder "
            f"{entry.target!r}."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderEntry(Entry):
    """A class that loads checkpoints."""

    reads: tuple[str, ...] = ()
    """Patterns of file names ("*.gguf"). The class can load such a file, or a folder that holds
    one."""
    quantization: str = "none"
    """The quantization of its checkpoints, if config.json states none and none is asked for."""


class LoaderRegistry(Registry[LoaderEntry]):
    """Checkpoint loaders, by load format."""

    noun = "load format"
    base = "toolkit_lm.model:CheckpointLoader"

    def add(
        self,
        load_format: str,
        target: str,
        *,
        reads: tuple[str, ...] = (),
        quantization: str = "none",
        override: bool = False,
    ) -> None:
        """Registers a subclass of toolkit_lm.model.CheckpointLoader. `reads`: patterns of file
        names; without any, it is never selected automatically. `quantization`: what its checkpoints
        have by default, even those with some layers or all of them in floats."""
        self.add_entry(
            LoaderEntry,
            load_format,
            target,
            "module:Class",
            reads=tuple(reads),
            quantization=quantization,
            override=override,
        )

    def reading(self, source: Path) -> str | None:
        """The first load format that reads a file, or a file of a folder."""
        names = [path.name for path in source.iterdir()] if source.is_dir() else [source.name]
        return next(
            (e.key for e in self.entries() if any(filter(names, pattern) for pattern in e.reads)),
            None,
        )


class QuantizationRegistry(PlainRegistry):
    """Subclasses of toolkit_lm.model.Quantization. The key is the checkpoints' `quant_method`, or
    the name of a method that quantizes at load."""

    noun = "quantization"
    base = "toolkit_lm.model:Quantization"

    def add_at_load(self, name: str, target: str, *, override: bool = False) -> None:
        """Registers a quantization of weights of floats, made while they are loaded. Its key is
        `at_load(name)`, so that checkpoints may have a `quant_method` of the same name."""
        self.add(self.at_load(name), target, override=override)

    @staticmethod
    def at_load(name: str) -> str:
        """The key of a quantization that is made at load, which the option `quantization` names."""
        return f"{name} at load"
