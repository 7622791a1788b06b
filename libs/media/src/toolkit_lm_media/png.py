"""Headers of PNG files."""

from __future__ import annotations

from toolkit_lm_media.header import Header, unpack
from toolkit_lm_media.refusal import RefusedError

MAGIC = b"\x89PNG\r\n\x1a\n"
_ANIMATION = (b"acTL", b"fcTL", b"fdAT")
_SPARE_CHUNKS = 1024
_BYTES_PER_CHUNK = 1024
"""On average, at least, after the spare chunks."""


def read(data: bytes) -> Header:
    """The size comes from IHDR. Raises RefusedError for a file that begins otherwise, or that is
    cut into too many chunks."""
    if data[12:16] != b"IHDR":
        raise RefusedError("it is a PNG without a header")
    width, height = unpack(">II", data, 16)
    return Header("PNG", width, height, _still(data))


def _still(data: bytes) -> bytes:
    """The file without its animation: the decoder warns of a broken one.

    The decoder takes microseconds per chunk, even for an empty one. Millions of them would take
    many seconds.
    """
    kept = []
    begin = 0
    offset = len(MAGIC)
    left = _SPARE_CHUNKS + len(data) // _BYTES_PER_CHUNK
    while offset + 8 <= len(data):
        start, offset = offset, offset + 12 + int.from_bytes(data[offset : offset + 4], "big")
        if data[start + 4 : start + 8] in _ANIMATION:
            kept.append(data[begin:start])
            begin = offset
        left -= 1
        if left < 0:
            raise RefusedError("it is a PNG of too many chunks")
    return b"".join([*kept, data[begin:]]) if kept else data
