"""Headers of WebP files."""

from __future__ import annotations

from toolkit_lm_media.header import AnimationHeader, Header, unpack
from toolkit_lm_media.refusal import RefusedError

_FIRST_CHUNK = 12
_MOST_CHUNKS = 2**14


def is_webp(data: bytes) -> bool:
    return data[:4] == b"RIFF" and data[8:12] == b"WEBP"


def read(data: bytes) -> Header:
    """The size comes from the first chunk, which holds the canvas or the picture. Raises
    RefusedError for another chunk."""
    body = _FIRST_CHUNK + 8
    match data[_FIRST_CHUNK : _FIRST_CHUNK + 4]:
        case b"VP8X":
            low, high = unpack("<IH", data, body + 4)
            bits = low | high << 32
            return Header("WEBP", (bits & 0xFFFFFF) + 1, (bits >> 24) + 1, data)
        case b"VP8L":
            (bits,) = unpack("<I", data, body + 1)
            return Header("WEBP", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, data)
        case b"VP8 ":
            width, height = unpack("<HH", data, body + 6)
            return Header("WEBP", width & 0x3FFF, height & 0x3FFF, data)
    raise RefusedError("it is a broken WEBP")


def read_animation(data: bytes) -> AnimationHeader:
    """Header of all frames; a file without animation has one. Raises RefusedError for a broken
    file, and for too many chunks."""
    header = read(data)
    durations: list[int] = []
    offset = _FIRST_CHUNK
    for _ in range(_MOST_CHUNKS):
        if offset >= len(data):
            return AnimationHeader("WEBP", header.width, header.height, data, durations or [0])
        (size,) = unpack("<I", data, offset + 4)
        if data[offset : offset + 4] == b"ANMF":
            low, high = unpack("<HB", data, offset + 20)
            durations.append(low | high << 16)
        offset += 8 + size + size % 2
    raise RefusedError("it is a WEBP of too many chunks")
