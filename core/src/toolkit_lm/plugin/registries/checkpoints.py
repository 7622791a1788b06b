"""Checkpoints that ship inside packages, and what loads and unpacks weights."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from fnmatch import filter
from pathlib import Path

from toolkit_lm.errors import CheckpointError
from toolkit_lm.plugin.registry import Entry, PlainRegistry, Registry


class CheckpointRegistry(Registry[Entry]):
    """Checkpoint folders that ship inside packages, by the name that MODEL may give."""

    noun = "checkpoint"
    pattern = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[\w-]+(/[\w-]+)*")

    def add(self, name: str, folder: str, *, override: bool = False) -> None:
        """Registers a folder, as "package:folder/inside/it"."""
        self.add_entry(Entry, name, folder, "package:folder", override=override)

    def path(self, name: str) -> Path:
        """The folder of a registered checkpoint. Raises CheckpointError when it is not there."""
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
    """Patterns of file names ("*.gguf"): it can load such a file, and a folder that holds one."""


class LoaderRegistry(Registry[LoaderEntry]):
    """Checkpoint loaders, by load format."""

    noun = "load format"
    base = "toolkit_lm.model:CheckpointLoader"

    def add(
        self, load_format: str, target: str, *, reads: tuple[str, ...] = (), override: bool = False
    ) -> None:
        """Registers a subclass of toolkit_lm.model.CheckpointLoader. `reads`: patterns of names;
        none: it is never chosen by itself."""
        self.add_entry(
            LoaderEntry, load_format, target, "module:Class", reads=tuple(reads), override=override
        )

    def reading(self, source: Path) -> str | None:
        """The first load format that reads a file, or a file of a folder."""
        names = [path.name for path in source.iterdir()] if source.is_dir() else [source.name]
        return next(
            (e.key for e in self.entries() if any(filter(names, pattern) for pattern in e.reads)),
            None,
        )


class QuantizationRegistry(PlainRegistry):
    """Subclasses of toolkit_lm.model.Quantization, by the `quant_method` of checkpoints, or a name
    for those that quantize at load."""

    noun = "quantization"
    base = "toolkit_lm.model:Quantization"
