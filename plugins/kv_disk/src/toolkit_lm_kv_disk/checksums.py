"""Checksums of blocks: XXH3 where the package xxhash is installed, which takes a fifth of the time,
and else CRC-32. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

from toolkit_lm.kv import Data

Checksum = Callable[[Sequence[Data]], int]
"""Returns 32 bits of parts that follow one another."""


def crc32_of(parts: Sequence[Data]) -> int:
    """Returns the CRC-32."""
    checksum = 0
    for part in parts:
        checksum = crc32(part, checksum)
    return checksum


def make_xxh3() -> Checksum | None:
    """Makes the function of the lower 32 bits of XXH3-64; None: the package is not installed."""
    try:
        from xxhash import xxh3_64
    except ImportError:
        return None
    make: Callable[[], Any] = xxh3_64

    def xxh3_of(parts: Sequence[Data]) -> int:
        digest = make()
        for part in parts:
            digest.update(part)
        return int(digest.intdigest()) & 0xFFFF_FFFF

    return xxh3_of
