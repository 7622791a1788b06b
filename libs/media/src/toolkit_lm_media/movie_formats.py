"""Recognizes movie formats by their first bytes, and checks that the end of the file is there."""

from __future__ import annotations

from toolkit_lm_media.header import unpack
from toolkit_lm_media.refusal import RefusedError

_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
"""One of which an MP4 or a MOV begins with, after its length."""
_MOST_BOXES = 2**16
_EBML = b"\x1a\x45\xdf\xa3"
_SEGMENT = b"\x18\x53\x80\x67"


def format_of(data: bytes) -> str | None:
    """The decoder's name of the format; None if the data is not a movie."""
    if data[4:8] in _BOXES:
        return "mov"
    return "matroska" if data.startswith(_EBML) else None


def require_whole(data: bytes, format: str) -> None:
    """Raises RefusedError where a part of the file goes on after the file's end. Decoders would
    show what there is."""
    end = _end_of_segment(data) if format == "matroska" else _end_of_boxes(data)
    if end > len(data):
        raise RefusedError("it is a truncated movie")


def _end_of_boxes(data: bytes) -> int:
    offset = 0
    for _ in range(_MOST_BOXES):
        if offset + 16 > len(data):
            return offset
        (size,) = unpack(">I", data, offset)
        if size == 1:
            (size,) = unpack(">Q", data, offset + 8)
        if size < 8:
            # Zero: to the end of the file. Others are no boxes, which some programs leave there.
            return offset
        offset += size
    raise RefusedError("it is a movie of too many boxes")


def _end_of_segment(data: bytes) -> int:
    size, offset = _number(data, len(_EBML))
    offset += size or 0
    if data[offset : offset + 4] != _SEGMENT:
        raise RefusedError("it is a broken movie")
    size, offset = _number(data, offset + 4)
    # Live streams do not say how long they are.
    return offset + (size or 0)


def _number(data: bytes, offset: int) -> tuple[int | None, int]:
    """A number whose first byte says how many there are, and the offset after it. None: it is not
    stated."""
    (first,) = unpack("<B", data, offset)
    length = 9 - first.bit_length()
    if length > 8:
        raise RefusedError("it is a broken movie")
    ones = (1 << 7 * length) - 1
    number = int.from_bytes(data[offset : offset + length], "big") & ones
    return (None if number == ones else number), offset + length
