"""The header of a picture: its format and size, read without the decoder.

Some decoders take memory or time while they open a file, so that the bounds come first.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from toolkit_lm_media.refusal import RefusedError


@dataclass(frozen=True)
class Header:
    """The format, the size in pixels, and what the decoder needs of the file."""

    format: str
    width: int
    height: int
    body: bytes
    exif: bytes = b""
    xmp: bytes = b""


@dataclass(frozen=True)
class AnimationHeader:
    """The same of an animation, and how long each frame is shown."""

    format: str
    width: int
    height: int
    body: bytes
    durations: list[int]
    """Milliseconds."""


def unpack(layout: str, data: bytes, offset: int) -> tuple[int, ...]:
    """Integers at `offset`. Raises RefusedError where the data ends before them."""
    try:
        return struct.unpack_from(layout, data, offset)
    except struct.error:
        raise RefusedError("its header is cut short") from None
