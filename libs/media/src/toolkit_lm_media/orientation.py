"""The way up of a picture, as its camera wrote it."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping

from PIL import Image

_ORIENTATION = 0x0112
_LAYOUTS = {3: "H", 4: "I"}
_XMP = re.compile(rb'tiff:Orientation(="|>)([0-9])')
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def turned(image: Image.Image, exif: bytes, xmp: bytes) -> Image.Image:
    """The picture the right way up, as ImageOps.exif_transpose has it. Broken metadata turns
    nothing, and warns of nothing."""
    found = _from_exif(exif.removeprefix(b"Exif\x00\x00"))
    turn = _TURNS.get(_from_xmp(xmp) if found is None else found)
    return image if turn is None else image.transpose(turn)


def metadata(info: Mapping[str | tuple[int, int], object]) -> tuple[bytes, bytes]:
    """EXIF and XMP from a decoded picture's `info`; b"" where there is none."""
    exif = info.get("exif", b"")
    xmp = info.get("xmp") or info.get("XML:com.adobe.xmp", b"")
    profile = info.get("Raw profile type exif")
    if not exif and isinstance(profile, str):
        exif = _from_profile(profile)
    if isinstance(xmp, str):
        xmp = xmp.encode()
    return exif if isinstance(exif, bytes) else b"", xmp if isinstance(xmp, bytes) else b""


def _from_profile(profile: str) -> bytes:
    """EXIF as ImageMagick writes it into PNG texts: three lines, then hexadecimal digits."""
    try:
        return bytes.fromhex("".join(profile.split("\n")[3:]))
    except ValueError:
        return b""


def _from_exif(exif: bytes) -> int | None:
    order = {b"II*\x00": "<", b"MM\x00*": ">"}.get(exif[:4])
    if order is None:
        return None
    try:
        (start,) = struct.unpack_from(order + "I", exif, 4)
        (count,) = struct.unpack_from(order + "H", exif, start)
        for offset in range(start + 2, start + 2 + 12 * count, 12):
            tag, kind = struct.unpack_from(order + "HH", exif, offset)
            if tag == _ORIENTATION and kind in _LAYOUTS:
                return int(struct.unpack_from(order + _LAYOUTS[kind], exif, offset + 8)[0])
    except struct.error:
        return None
    return None


def _from_xmp(xmp: bytes) -> int:
    found = _XMP.search(xmp)
    return int(found[2]) if found else 1
