"""Headers of BMP files."""

from __future__ import annotations

from toolkit_lm_media.header import Header, unpack
from toolkit_lm_media.refusal import RefusedError

MAGIC = b"BM"
_OLD_HEADER = 12
_RUN_LENGTHS = (1, 2)


def read(data: bytes) -> Header:
    """The size comes from the second header. Raises RefusedError for run lengths: their decoder is
    slow."""
    (length,) = unpack("<I", data, 14)
    if length == _OLD_HEADER:
        width, height = unpack("<HH", data, 18)
        return Header("BMP", width, height, data)
    width, height = unpack("<ii", data, 18)
    (compression,) = unpack("<I", data, 30)
    if compression in _RUN_LENGTHS:
        raise RefusedError("it is a BMP with run lengths; send a PNG")
    # Rows go down the picture where the height is negative.
    return Header("BMP", width, abs(height), data)
