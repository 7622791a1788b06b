"""Headers of JPEG files."""

from __future__ import annotations

import re

from toolkit_lm_media.header import Header, unpack
from toolkit_lm_media.refusal import RefusedError

MAGIC = b"\xff\xd8\xff"
_MARKER = re.compile(rb"\xff([^\xff\x00])", re.DOTALL)
_MOST_SEGMENTS = 2048
"""Before the first scan."""
_MOST_SCANS = 64
"""Each costs a pass over all pixels; progressive files have some ten."""
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_BARE = {0x01, *range(0xD0, 0xD9)}
_END = 0xD9
_SCAN = 0xDA
_EXIF = 0xE1
_COMMENT = 0xFE
_COLOURS = {0xE0, 0xEE}
"""JFIF and Adobe, which say what the channels are."""
_XMP = b"http://ns.adobe.com/xap/1.0/\x00"


def read(data: bytes) -> Header:
    """The size comes from the one frame header. The body leaves out what is not for the pixels,
    such as thumbnails.

    Raises RefusedError for no frame or several, too many segments, or too many scans.
    """
    kept = [data[:2]]
    texts = {b"Exif\x00\x00": b"", _XMP: b""}
    sizes: list[tuple[int, ...]] = []
    offset = 2
    for _ in range(_MOST_SEGMENTS):
        marker, start, end = _segment(data, offset)
        if marker == _SCAN:
            return _header(
                b"".join([*kept, data[start - 2 :]]),
                data.count(b"\xff\xda", start - 2),
                sizes,
                texts,
            )
        if marker in _FRAMES:
            sizes.append(unpack(">HH", data, start + 3))
        if marker == _EXIF:
            _keep_text(texts, data[start + 2 : end])
        if marker in _COLOURS or not (marker == _COMMENT or 0xE0 <= marker <= 0xEF):
            kept.append(data[start - 2 : end])
        offset = end
    raise RefusedError("it is a JPEG of too many segments")


def _segment(data: bytes, offset: int) -> tuple[int, int, int]:
    """The next marker, the offset after it, and the offset where its segment ends."""
    found = _MARKER.search(data, offset)
    if found is None or found[1][0] == _END:
        raise RefusedError("it is a JPEG that ends before its pixels")
    marker = found[1][0]
    start = found.end()
    if marker in _BARE:
        return marker, start, start
    (length,) = unpack(">H", data, start)
    return marker, start, start + max(2, length)


def _keep_text(texts: dict[bytes, bytes], payload: bytes) -> None:
    for head, text in texts.items():
        if payload.startswith(head) and not text:
            texts[head] = payload[len(head) :]


def _header(
    body: bytes, scans: int, sizes: list[tuple[int, ...]], texts: dict[bytes, bytes]
) -> Header:
    if len(sizes) != 1:
        raise RefusedError("it is a broken JPEG")
    if scans > _MOST_SCANS:
        raise RefusedError(f"it is a JPEG of more than {_MOST_SCANS} scans")
    height, width = sizes[0]
    exif, xmp = texts.values()
    return Header("JPEG", width, height, body, exif, xmp)
