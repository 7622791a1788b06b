"""Reads a recording's length from its header, to detect truncated files, which libsndfile reads
without an error."""

from __future__ import annotations

import struct

from toolkit_lm_media import movie_formats
from toolkit_lm_media.refusal import RefusedError

MP3_SLACK = 4 * 1152
"""Samples that an MP3 may lack: encoders count what they have put before and after."""
_MOST_CHUNKS = 1000
_UNKNOWN = 0xFFFFFFFF
"""The size in a WAV that was written to a pipe."""
_LAST = 4
_HEADER = 27
"""The flag of an Ogg stream's last page, and bytes of a page before its table of sizes."""
_MOST_PAGE = 65_307


CONTAINERS = {"mov": "MP4", "matroska": "WEBM", "aac": "AAC"}
"""Formats that FFmpeg decodes, by FFmpeg's name."""
_MOST_AAC_FRAMES = 2**18


def format_of(data: bytes) -> str:
    """ "WAV", "FLAC", "OGG", "MP3", "MP4", "WEBM" or "AAC", of the first bytes of a recording."""
    if (container := container_of(data)) is not None:
        return CONTAINERS[container]
    return {b"RIFF": "WAV", b"fLaC": "FLAC", b"OggS": "OGG"}.get(data[:4], "MP3")


def container_of(data: bytes) -> str | None:
    """FFmpeg's name of the format; None: FFmpeg does not decode it here (libsndfile may)."""
    if len(data) > 1 and data[0] == 0xFF and data[1] & 0xF6 == 0xF0:
        return "aac"
    return movie_formats.format_of(data)


def require_whole_container(data: bytes, container: str) -> None:
    """Raises RefusedError for a file that ends too early: FFmpeg would play what there is."""
    if container != "aac":
        movie_formats.require_whole(data, container)
        return
    offset = 0
    for _ in range(_MOST_AAC_FRAMES):
        header = data[offset : offset + 7]
        if len(header) < 7 or header[0] != 0xFF or header[1] & 0xF6 != 0xF0:
            break
        offset += (header[3] & 3) << 11 | header[4] << 3 | header[5] >> 5
    if offset > len(data) or 0 < len(data) - offset < 7:
        raise RefusedError("it is a truncated AAC")


def require_whole(data: bytes) -> int | None:
    """How many frames there must be, where a FLAC's header says it. Raises RefusedError for a WAV
    or an Ogg that ends too early."""
    if data.startswith(b"RIFF"):
        _require_whole_wav(data)
    elif data.startswith(b"OggS"):
        _require_whole_ogg(data)
    elif data.startswith(b"fLaC") and len(data) >= 26:
        return int.from_bytes(data[21:26], "big") & (2**36 - 1)
    return None


def _require_whole_wav(data: bytes) -> None:
    offset = 12
    for _ in range(_MOST_CHUNKS):
        name = data[offset : offset + 4]
        size = data[offset + 4 : offset + 8]
        if len(size) < 4:
            raise RefusedError("it is a truncated WAV: it has no samples")
        (count,) = struct.unpack("<I", size)
        if name == b"data":
            if count != _UNKNOWN and count > len(data) - offset - 8:
                raise RefusedError(
                    f"it is a truncated WAV: {len(data) - offset - 8} of {count} bytes of "
                    "samples are there"
                )
            return
        offset += 8 + count + count % 2
    raise RefusedError("it is a WAV of too many chunks")


def _require_whole_ogg(data: bytes) -> None:
    place = data.rfind(b"OggS", max(0, len(data) - _MOST_PAGE))
    page = data[place:] if place >= 0 else b""
    if len(page) >= _HEADER and page[5] & _LAST:
        count = page[_HEADER - 1]
        if _HEADER + count + sum(page[_HEADER : _HEADER + count]) <= len(page):
            return
    raise RefusedError("it is a truncated Ogg: its last page is not there")
