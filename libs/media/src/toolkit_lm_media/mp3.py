"""MP3 files that do not say how long they are: libsndfile would guess it by the first frame, and
read no further.

Their frames are counted by their headers (ISO 11172-3, 13818-3), and a frame that says the number
(Xing's) is put before them.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_MARKS = (b"Xing", b"Info", b"VBRI")
_SEARCHED = 256
"""Bytes from the start of the first frame in which a mark would be."""
_MORE = 1.0
"""Seconds: decoders leave some of the first frame out."""
_MPEG1 = 3
_LAYER3 = 1
_MONO = 3
_NO_CHECKSUM = 1
_KBPS = {
    True: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    False: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
"""Bit rates in kbit/s, by whether the version is MPEG-1."""
_RATES = {_MPEG1: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}
"""Sampling rates by MPEG version."""
_KBPS_OF_MARK = 8 << 4
"""The index of a bit rate at which a frame has room for the mark."""


class Frame(NamedTuple):
    """Properties in a frame's header."""

    size: int
    """Bytes."""
    samples: int
    rate: int
    side: int
    """Bytes of side information."""


def start_of(data: bytes) -> int:
    """Offset of the first frame, after any tag."""
    if not data.startswith(b"ID3") or len(data) < 10:
        return 0
    size = 0
    for byte in data[6:10]:
        size = size << 7 | byte & 0x7F
    return 10 + size


def states_length(data: bytes) -> bool:
    """Whether the first frame does."""
    start = start_of(data)
    head = data[start : start + _SEARCHED]
    return any(mark in head for mark in _MARKS)


def with_length(data: bytes, max_seconds: float) -> bytes:
    """A file that says how long it is. Frames are counted until there are more than `max_seconds`
    of them; one alone may be chance."""
    start = start_of(data)
    count = 0
    seconds = 0.0
    place = start
    while seconds <= max_seconds + _MORE and (frame := _frame(data[place : place + 4])) is not None:
        count, seconds, place = count + 1, seconds + frame.samples / frame.rate, place + frame.size
    if count < 2:
        return data
    header = bytearray(data[start : start + 4])
    header[1] |= _NO_CHECKSUM
    header[2] = header[2] & 0x0C | _KBPS_OF_MARK
    mark = _frame(bytes(header))
    assert mark is not None, "the first frame has a header"
    header_bytes = bytes(header) + bytes(mark.side) + b"Xing" + struct.pack(">II", 1, count)
    return data[:start] + header_bytes.ljust(mark.size, b"\0") + data[start:]


def _frame(header: bytes) -> Frame | None:
    if len(header) < 4 or header[0] != 0xFF or header[1] & 0xE0 != 0xE0:
        return None
    version = header[1] >> 3 & 3
    layer = header[1] >> 1 & 3
    kbps = header[2] >> 4
    rate = header[2] >> 2 & 3
    if version not in _RATES or layer != _LAYER3 or not 0 < kbps < 15 or rate == 3:
        return None
    is_first = version == _MPEG1
    is_mono = header[3] >> 6 == _MONO
    hertz = _RATES[version][rate]
    size = (144 if is_first else 72) * 1000 * _KBPS[is_first][kbps] // hertz + (header[2] >> 1 & 1)
    stereo, mono = (32, 17) if is_first else (17, 9)
    side = mono if is_mono else stereo
    return Frame(size, 1152 if is_first else 576, hertz, side)
