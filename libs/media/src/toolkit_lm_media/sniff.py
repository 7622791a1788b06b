"""The modality of a file, by its first bytes."""

from __future__ import annotations

from typing import Literal

from toolkit_lm_media import bmp, gif, jpeg, movie_formats, png, webp

_SOUNDS = (
    b"ID3",
    b"fLaC",
    b"OggS",
    *(
        bytes((0xFF, second))
        for second in (0xF0, 0xF1, 0xF2, 0xF3, 0xF8, 0xF9, 0xFA, 0xFB, 0xE2, 0xE3)
    ),
)
_SOUND_BRANDS = (b"M4A ", b"M4B ")
"""Brands of MP4 files without pictures."""


def modality_of(data: bytes) -> Literal["image", "video", "audio"] | None:
    """Modality of a file, or of its first 12 bytes. An animation is an image. None: the format is
    not known."""
    if data.startswith((png.MAGIC, jpeg.MAGIC, *gif.MAGICS, bmp.MAGIC)) or webp.is_webp(data):
        return "image"
    if data.startswith(_SOUNDS) or (data[:4] == b"RIFF" and data[8:12] == b"WAVE"):
        return "audio"
    if data[4:8] == b"ftyp" and data[8:12] in _SOUND_BRANDS:
        return "audio"
    return "video" if movie_formats.format_of(data) is not None else None
