"""A GGUF checkpoint: one file, or all files that it is split into. Needs no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from toolkit_lm.errors import CheckpointError

from toolkit_lm_gguf.container import Container, TensorInfo

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_NO_MODEL = "mmproj"
"""Prefix of the names of files that hold only the encoder of media."""

Value = TypeVar("Value")


class GGUFFile:
    """A checkpoint whose header has been read. Raises CheckpointError for a file that is missing or
    broken, and UnsupportedError for tensors of types that cannot be read."""

    def __init__(self, source: Path) -> None:
        """`source`: a file, any file of a split checkpoint, or the folder that holds it."""
        self.paths = find_files(source)
        self.path = self.paths[0]
        containers = [Container(path) for path in self.paths]
        self._first = containers[0]
        self.tensors: dict[str, TensorInfo] = {}
        for container in containers:
            for name, tensor in container.tensors.items():
                if name in self.tensors:
                    container.fail(f"holds the tensor {name}, which another of the files has too")
                self.tensors[name] = tensor
        stated = self.get("split.count", int, 1)
        if stated > 1 and stated != len(self.paths):
            self.fail(
                f"is one of {stated} files, and its name does not say so (NAME-00001-of-"
                f"{stated:05}.gguf)"
            )
        self.architecture = self.require("general.architecture", str)

    def get(self, key: str, of_type: type[Value], default: Value) -> Value:
        """A value of the metadata. "{arch}" in its key is the architecture. Raises CheckpointError
        for a value of another type."""
        key = self._full(key)
        value = self._first.get(key)
        if value is None:
            return default
        if of_type is float and type(value) is int:
            value = float(value)
        if type(value) is not of_type:
            self.fail(f"states {key} as {type(value).__name__}, not {of_type.__name__}")
        return value

    def find(self, key: str, of_type: type[Value]) -> Value | None:
        """A value of the metadata; None: it is not stated."""
        default: Any = None
        value: Value | None = self.get(key, of_type, default)
        return value

    def require(self, key: str, of_type: type[Value]) -> Value:
        """A value of the metadata. Raises CheckpointError if it is not stated."""
        value = self.find(key, of_type)
        if value is None:
            self.fail(f"states no {self._full(key)}")
        return value

    def _full(self, key: str) -> str:
        return key.format(arch=getattr(self, "architecture", ""))

    def fail(self, problem: str) -> NoReturn:
        """Raises CheckpointError. `problem`: what the file does, as a verb and its object."""
        self._first.fail(problem)


def find_files(source: Path) -> list[Path]:
    """Files of the checkpoint at `source`, in their order. Raises CheckpointError."""
    path = _in_folder(source) if source.is_dir() else source
    split = _SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    stem, _, count = split.groups()
    return [
        path.with_name(f"{stem}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)
    ] or [path]


def _in_folder(folder: Path) -> Path:
    files = [path for path in sorted(folder.glob("*.gguf")) if not path.name.startswith(_NO_MODEL)]
    checkpoints = {
        (split[1], split[3]) if (split := _SPLIT.fullmatch(path.name)) else path.name
        for path in files
    }
    if len(checkpoints) != 1:
        names = ", ".join(path.name for path in files[:10]) or "none"
        raise CheckpointError(
            f"{folder} holds {len(checkpoints)} GGUF checkpoints, not one: name the file. It has: "
            f"{names}."
        )
    return files[0]
