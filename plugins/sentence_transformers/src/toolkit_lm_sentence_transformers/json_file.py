"""Reads a JSON object key by key, and refuses keys that were not read."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from toolkit_lm.errors import CheckpointError, nearest

T = TypeVar("T")
_NAMES = {bool: "true or false", int: "an integer", str: "text", dict: "an object", list: "a list"}


MOST_BYTES = 2**24
"""Most bytes of a JSON file other than the tokenizer itself."""


def read_json_file(path: Path, most: int | None = MOST_BYTES) -> Any:
    """The value in a JSON file of at most `most` bytes. Raises CheckpointError."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{str(path)!r} cannot be read: it is not a regular file.")
    if most is not None and path.exists() and path.stat().st_size > most:
        raise CheckpointError(f"{str(path)!r} is too large: it may have {most} bytes.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error


class JsonObject:
    """A JSON object of a checkpoint. Each key is taken once; `finish` refuses the rest, so that no
    setting is passed over in silence."""

    def __init__(self, source: str, data: Any) -> None:
        if not isinstance(data, dict):
            raise CheckpointError(f"{source} must hold a JSON object, not {reprlib.repr(data)}.")
        self.source = source
        self._left = dict(data)
        self._known: set[str] = set()

    @classmethod
    def read(cls, path: Path) -> JsonObject:
        """The object in a file. Raises CheckpointError."""
        return cls(repr(str(path)), read_json_file(path))

    def __contains__(self, key: str) -> bool:
        return key in self._left

    def require(self, key: str, kind: type[T]) -> T:
        """The value of a key that must be there. Raises CheckpointError unless it is of `kind`."""
        if key not in self._left:
            raise CheckpointError(f"{self.source} does not say {key!r}.")
        value = self.get(key, kind)
        if value is None:
            raise CheckpointError(f"{self.source}: {key!r} must be {_NAMES[kind]}, not null.")
        return value

    def get(self, key: str, kind: type[T]) -> T | None:
        """The value of a key that may be missing or null. Raises CheckpointError unless it is of
        `kind`."""
        value = self.pop(key)
        if value is not None and type(value) is not kind:
            raise CheckpointError(
                f"{self.source}: {key!r} must be {_NAMES[kind]}, not {reprlib.repr(value)}."
            )
        return value

    def pop(self, key: str) -> Any:
        """The value of a key, of any type; None where it is missing."""
        self._known.add(key)
        return self._left.pop(key, None)

    def ignore(self, keys: Iterable[str]) -> None:
        """Keys that change nothing of the result."""
        for key in keys:
            self._known.add(key)
            self._left.pop(key, None)

    def finish(self) -> None:
        """Raises CheckpointError when keys are left."""
        for key in self._left:
            raise CheckpointError(
                f"{self.source} has the key {key!r}, which is not understood. "
                f"{nearest(key, self._known)}"
            )


def choose(source: str, key: str, value: Any, known: Iterable[str]) -> str:
    """`value`, when it is one of `known`. Raises CheckpointError that names `source` and `key`."""
    known = list(known)
    if value not in known:
        raise CheckpointError(
            f"{source}: {key!r} is {reprlib.repr(value)}, which is not understood. "
            f"{nearest(str(value), known)}"
        )
    return str(value)
