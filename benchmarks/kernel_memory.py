"""Arrays for kernels, by address, without torch and numpy."""

from __future__ import annotations

import ctypes
import random
import struct
from array import array
from typing import Any

SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element."""


class Memory:
    """Arrays for kernels, by address, aligned to a cache line. They live as long as this does."""

    def __init__(self) -> None:
        self._held: list[Any] = []
        generator = random.Random(0)
        self._pattern = [generator.uniform(-1, 1) for _ in range(1021)]

    def put(self, content: bytes) -> int:
        buffer = ctypes.create_string_buffer(len(content) + 64)
        self._held.append(buffer)
        address = -(-ctypes.addressof(buffer) // 64) * 64
        ctypes.memmove(address, content, len(content))
        return address

    def empty(self, size: int) -> int:
        return self.put(bytes(size))

    def integers(self, kind: str, values: list[int]) -> int:
        """`kind`: "i" for int32, "q" for int64."""
        return self.put(array(kind, values).tobytes())

    def floats(self, dtype: str, count: int) -> int:
        """Numbers from -1 to 1."""
        if dtype == "float16":
            pattern = struct.pack(f"{len(self._pattern)}e", *self._pattern)
        else:
            pattern = array("f", self._pattern).tobytes()
        if dtype == "bfloat16":
            pattern = b"".join(pattern[i + 2 : i + 4] for i in range(0, len(pattern), 4))
        size = count * SIZES[dtype]
        return self.put((pattern * (size // len(pattern) + 1))[:size])

    def codes(self, bits: int, count: int) -> int:
        pattern = random.Random(bits).randbytes(1021)
        pattern = bytes(byte % 2**bits for byte in pattern)
        return self.put((pattern * (count // len(pattern) + 1))[:count])
