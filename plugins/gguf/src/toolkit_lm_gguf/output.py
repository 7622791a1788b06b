"""Writes the container of a GGUF file: its metadata, and room for its tensors, which are filled in
any order. Needs no torch."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from toolkit_lm_gguf.types import TYPES, TensorType

_ALIGNMENT = 32
_UINT32 = 4
_INT32 = 5
_FLOAT32 = 6
_BOOL = 7
_STRING = 8
_ARRAY = 9
_NUMBERS = {of_type: number for number, of_type in TYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor of a file that is written."""

    type: TensorType
    shape: tuple[int, ...]
    """Its size, the outermost dimension first."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.type.block * self.type.block_bytes


class Output:
    """A new file with its header, as long as it will be."""

    def __init__(
        self, path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorLayout]
    ) -> None:
        """`metadata`: texts, booleans, integers, floats, and lists of one of these. Raises
        OSError."""
        values = b"".join(_text(key) + _value(value) for key, value in metadata.items())
        infos = []
        self._starts: dict[str, int] = {}
        offset = 0
        for name, layout in tensors.items():
            sizes = struct.pack(f"<{len(layout.shape)}Q", *reversed(layout.shape))
            infos.append(
                _text(name)
                + struct.pack("<I", len(layout.shape))
                + sizes
                + struct.pack("<IQ", _NUMBERS[layout.type], offset)
            )
            self._starts[name] = offset
            offset += _aligned(layout.num_bytes)
        counts = struct.pack("<IQQ", 3, len(tensors), len(metadata))
        header = b"GGUF" + counts + values + b"".join(infos)
        self._first = _aligned(len(header))
        self._file: BinaryIO = path.open("wb")
        self._file.write(header)
        self._file.truncate(self._first + offset)

    def write(self, name: str, at: int, content: memoryview | bytes) -> None:
        """Writes bytes of a tensor, from its byte `at` on."""
        self._file.seek(self._first + self._starts[name] + at)
        self._file.write(content)

    def close(self) -> None:
        self._file.close()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    """A value after its type."""
    if not isinstance(value, list):
        kind, item = _item(value, _UINT32)
        return struct.pack("<I", kind) + item
    # Types of tokens are signed. A list of nothing is one of texts.
    items = [_item(item, _INT32) for item in value]
    kind = items[0][0] if items else _STRING
    return struct.pack("<IIQ", _ARRAY, kind, len(items)) + b"".join(raw for _, raw in items)


def _item(value: Any, integer: int) -> tuple[int, bytes]:
    """A value, and its type: `integer` for integers."""
    match value:
        case bool():
            return _BOOL, struct.pack("<?", value)
        case int():
            return integer, struct.pack("<I", value)
        case float():
            return _FLOAT32, struct.pack("<f", value)
        case str():
            return _STRING, _text(value)
    raise TypeError(f"no value of a GGUF file: {value!r}")
