"""The container of a GGUF file: its metadata, and where its tensors lie. Needs no torch.

All sizes and counts are checked against the length of the file before they are used. Memory grows
with the file, never with a number that the file states.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from toolkit_lm.errors import CheckpointError, UnsupportedError

from toolkit_lm_gguf.types import TYPES, UNREADABLE, TensorType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING = 8
_ARRAY = 9
_FORMATS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Formats of the module `struct`, by the type of a value of the metadata."""
_LENGTH = struct.Struct("<Q")
_MOST_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a mapped file."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    """Its size, the outermost dimension first."""
    start: int
    """Offset of its first byte in the file."""
    num_bytes: int
    data: mmap.mmap
    """The file."""

    def release(self) -> None:
        """Gives the tensor's pages back to the system. What reads them again, reads the file."""
        if hasattr(mmap, "MADV_DONTNEED"):
            first = self.start // mmap.PAGESIZE * mmap.PAGESIZE
            length = self.start + self.num_bytes - first
            self.data.madvise(mmap.MADV_DONTNEED, first, length)


@dataclass(frozen=True, slots=True)
class _Array:
    """An array of the metadata, which is decoded when it is asked for."""

    of_type: int
    count: int
    start: int


class Container:
    """One mapped GGUF file. Raises CheckpointError for one that is missing or broken, and
    UnsupportedError for tensors of types that cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # Private pages: nothing is written, and torch may view them without a warning.
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        self._at = 0
        if self._read(4, "the magic number") != _MAGIC:
            self.fail(f"does not begin with {_MAGIC.decode()}: it is no GGUF file")
        version = self._number("I", "the version")
        if version not in _VERSIONS:
            known = " or ".join(map(str, _VERSIONS))
            self.fail(f"has GGUF version {version}, not {known} in little-endian order")
        num_tensors = self._number("Q", "the number of tensors")
        num_values = self._number("Q", "the number of metadata values")
        self._values: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string("a key of the metadata")
            if key in self._values:
                self.fail(f"states {key!r} twice")
            self._values[key] = self._value(key)
        self.tensors: dict[str, TensorInfo] = self._tensors(num_tensors)

    def get(self, key: str) -> Any:
        """A value of the metadata, or a list; None: it is not stated."""
        value = self._values.get(key)
        return self._decoded(key, value) if isinstance(value, _Array) else value

    def fail(self, problem: str) -> NoReturn:
        """Raises CheckpointError. `problem`: what the file does, as a verb and its object."""
        raise CheckpointError(f"{self.path} {problem}.")

    def _read(self, count: int, field: str) -> bytes:
        start = self._at
        self._skip(count, field)
        return self._data[start : self._at]

    def _skip(self, count: int, field: str) -> None:
        if count > len(self._data) - self._at:
            self.fail(
                f"is truncated or broken: {field} needs {count} bytes from byte {self._at} on, and "
                f"the file has {len(self._data)}"
            )
        self._at += count

    def _number(self, of_format: str, field: str) -> Any:
        packed = struct.Struct(f"<{of_format}")
        return packed.unpack(self._read(packed.size, field))[0]

    def _string(self, field: str) -> str:
        return self._text(self._read(self._number("Q", f"the length of {field}"), field), field)

    def _text(self, raw: bytes, field: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(f"is broken: {field} is not UTF-8")

    def _value(self, key: str) -> Any:
        of_type = self._number("I", f"the type of {key}")
        if of_type == _STRING:
            return self._string(key)
        if of_type == _ARRAY:
            return self._array(key)
        if of_type not in _FORMATS:
            self.fail(f"is broken: {key} has the unknown type {of_type}")
        return self._number(_FORMATS[of_type], key)

    def _array(self, key: str) -> _Array:
        of_type = self._number("I", f"the type of {key}")
        count = self._number("Q", f"the length of {key}")
        array = _Array(of_type, count, self._at)
        if of_type in _FORMATS:
            self._skip(count * struct.calcsize(f"<{_FORMATS[of_type]}"), key)
        elif of_type == _STRING:
            self._skip_strings(count, key)
        else:
            self.fail(f"is broken: {key} is an array of the unknown type {of_type}")
        return array

    def _skip_strings(self, count: int, key: str) -> None:
        # A vocabulary has hundreds of thousands.
        unpack = _LENGTH.unpack_from
        data = self._data
        at = self._at
        last = len(data) - _LENGTH.size
        for _ in range(count):
            if at > last:
                break
            at += _LENGTH.size + unpack(data, at)[0]
        else:
            last = len(data)
        if at > last:
            self.fail(f"is truncated or broken: {key} has {count} texts, and they end after it")
        self._at = at

    def _decoded(self, key: str, array: _Array) -> list[Any]:
        if array.of_type != _STRING:
            packed = f"<{array.count}{_FORMATS[array.of_type]}"
            return list(struct.unpack_from(packed, self._data, array.start))
        found = []
        at = array.start
        for _ in range(array.count):
            (length,) = _LENGTH.unpack_from(self._data, at)
            at += _LENGTH.size + length
            found.append(self._text(self._data[at - length : at], key))
        return found

    def _tensors(self, count: int) -> dict[str, TensorInfo]:
        stated: dict[str, tuple[TensorType, tuple[int, ...], int]] = {}
        for _ in range(count):
            name = self._string("the name of a tensor")
            if name in stated:
                self.fail(f"holds two tensors {name!r}")
            stated[name] = self._tensor(name)
        alignment = self.get("general.alignment")
        alignment = 32 if alignment is None else alignment
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            self.fail(f"states general.alignment {alignment!r}, which is no power of two")
        first = -(-self._at // alignment) * alignment
        tensors = {}
        for name, (of_type, shape, offset) in stated.items():
            size = of_type.block_bytes
            for dimension in shape:
                size *= dimension
            size //= of_type.block
            if offset % alignment or first + offset + size > len(self._data):
                self.fail(
                    f"is truncated or broken: the tensor {name} ({of_type.name} {list(shape)}) "
                    f"has {size} bytes from byte {first + offset} on (the alignment is "
                    f"{alignment}), and the file has {len(self._data)}"
                )
            tensors[name] = TensorInfo(name, of_type, shape, first + offset, size, self._data)
        return tensors

    def _tensor(self, name: str) -> tuple[TensorType, tuple[int, ...], int]:
        """Type, shape, and offset within the data."""
        num_dimensions = self._number("I", name)
        if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
            self.fail(f"is broken: the tensor {name} has {num_dimensions} dimensions, not 1 to 4")
        shape = tuple(reversed([self._number("Q", name) for _ in range(num_dimensions)]))
        number = self._number("I", name)
        offset = self._number("Q", name)
        if number in UNREADABLE:
            raise UnsupportedError(
                f"{self.path}: the tensor {name} has the type {UNREADABLE[number]}, which cannot "
                f"be read. Able: {', '.join(known.name for known in TYPES.values())}. llama.cpp's "
                "llama-quantize writes files of those types."
            )
        if number not in TYPES:
            self.fail(f"is broken: the tensor {name} has the unknown type {number}")
        of_type = TYPES[number]
        if 0 in shape or shape[-1] % of_type.block:
            self.fail(
                f"is broken: the tensor {name} has the shape {list(shape)}, and {of_type.name} "
                f"holds rows of whole blocks of {of_type.block}"
            )
        return of_type, shape, offset
