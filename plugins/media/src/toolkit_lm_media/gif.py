"""Headers of GIF files."""

from __future__ import annotations

from toolkit_lm_media.header import Header, unpack
from toolkit_lm_media.refusal import RefusedError

MAGICS = (b"GIF87a", b"GIF89a")
_MOST_BLOCKS = 2**14
"""Before the first frame."""
_EXTENSION, _FRAME = 0x21, 0x2C
_CONTROL = 0xF9


def read(data: bytes) -> Header:
    """The size spans the screen and the first frame. The body leaves out comments: the decoder adds up their blocks in quadratic time.

    Raises RefusedError where there is no frame, or where too many blocks come before it.
    """
    width, height, flags = unpack("<HHB", data, 6)
    start = 13 + _table_size(flags)
    frame, control = _first_frame(data, start)
    left, top, across, down = unpack("<HHHH", data, frame + 1)
    return Header("GIF", max(width, left + across), max(height, top + down), data[:start] + control + data[frame:])


def _table_size(flags: int) -> int:
    """Bytes of the colour table."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _first_frame(data: bytes, offset: int) -> tuple[int, bytes]:
    """The offset of the first frame, and the control extension that goes with it."""
    control, left = b"", _MOST_BLOCKS
    while left > 0:
        (kind,) = unpack("<B", data, offset)
        if kind == _FRAME:
            return offset, control
        if kind != _EXTENSION:
            raise RefusedError("it is a broken GIF")
        (label,) = unpack("<B", data, offset + 1)
        end, left = _end_of_blocks(data, offset + 2, left - 1)
        if label == _CONTROL:
            control = data[offset:end]
        offset = end
    raise RefusedError("it is a GIF of too many blocks before its first frame")


def _end_of_blocks(data: bytes, offset: int, left: int) -> tuple[int, int]:
    """The offset after the blocks of an extension, and how many more may come."""
    while left > 0:
        (length,) = unpack("<B", data, offset)
        offset, left = offset + 1 + length, left - 1
        if not length:
            break
    return offset, left
