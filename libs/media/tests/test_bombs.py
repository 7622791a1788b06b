"""Hostile files: each a RequestError, within a second."""

from __future__ import annotations

import io
import resource
import struct
import warnings
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image
from sounds import cpu_seconds
from toolkit_lm.errors import RequestError
from toolkit_lm_media.image import open_image
from toolkit_lm_media.limits import MediaLimits

LIMITS = MediaLimits()
SECONDS = 1.0
"""Processor seconds of this process, and of those it has started for the item."""


def chunk(name: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(*chunks: bytes, width: int = 1, height: int = 1) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks)


PIXEL = chunk(b"IDAT", zlib.compress(b"\x00\x01\x02\x03"))
END = chunk(b"IEND")
BOMB = zlib.compress(bytes(2**26))


def zeros_png(width: int, height: int) -> bytes:
    """The header of a whole picture, and its first row."""
    packer = zlib.compressobj(1)
    row = bytes(1 + 3 * width)
    return png(
        chunk(b"IDAT", packer.compress(row) + packer.flush()), END, width=width, height=height
    )


def noise(format: str, size: int = 200, **options: object) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, format, **options)
    return file.getvalue()


def cut(format: str) -> bytes:
    data = noise(format)
    return data[: len(data) * 2 // 3]


def many_frames() -> bytes:
    frames = [Image.new("P", (2, 2), n % 250) for n in range(3000)]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=10)
    return file.getvalue()


def many_scans() -> bytes:
    data = noise("JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * 100 + data[-2:]


def gif(extension: bytes, width: int = 1, height: int = 1, left: int = 0) -> bytes:
    frame = b"," + struct.pack("<HHHHB", left, 0, width, height, 0) + b"\x02\x02\x44\x01\x00"
    return b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6) + extension + frame + b";"


def bmp(width: int, height: int, compression: int = 0) -> bytes:
    picture = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, compression, 4, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 58, 0, 0, 54) + picture + bytes(4)


def webp(width: int, height: int) -> bytes:
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + size
    return b"RIFF" + struct.pack("<I", len(body)) + body


def jpeg(height: int, width: int, segments: bytes = b"") -> bytes:
    frame = struct.pack(">HBHHB", 11, 8, height, width, 1) + b"\x01\x11\x00"
    return (
        b"\xff\xd8"
        + segments
        + b"\xff\xc0"
        + frame
        + b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00"
        + b"\xff\xd9"
    )


BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "it is empty"),
    "too many bytes": (
        lambda: b"\x89PNG\r\n\x1a\n" + bytes(LIMITS.max_bytes),
        "more than the 25 MiB",
    ),
    "text": (lambda: b"this is no picture.png", "not a picture of a known format"),
    "SVG": (
        lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "not a picture of a known format",
    ),
    "TIFF": (lambda: noise("TIFF"), "not a picture of a known format"),
    "EPS": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n", "not a picture of a known format"),
    "a huge PNG": (lambda: zeros_png(50_000, 50_000), "50000 x 50000 pixels"),
    "a PNG above Pillow's warning": (lambda: zeros_png(12_000, 12_000), "12000 x 12000 pixels"),
    "a PNG of the widest width": (
        lambda: png(PIXEL, END, width=2**31 - 1, height=2**31 - 1),
        "pixels",
    ),
    "a PNG with two headers": (
        lambda: png(chunk(b"IHDR", struct.pack(">IIBBBBB", 6000, 6001, 8, 2, 0, 0, 0)), PIXEL, END),
        "two sizes",
    ),
    "a PNG with no pixels": (lambda: png(PIXEL, END, width=0), "no pixels"),
    "a PNG without data": (lambda: png(END), "broken or truncated PNG"),
    "a PNG's magic alone": (lambda: png()[:8], "without a header"),
    "a PNG of fewer rows": (lambda: zeros_png(300, 300), ""),
    "a zTXt bomb": (
        lambda: png(chunk(b"zTXt", b"k\x00\x00" + BOMB), PIXEL, END),
        "broken or truncated PNG",
    ),
    "a zTXt bomb at the end": (
        lambda: png(PIXEL, chunk(b"zTXt", b"k\x00\x00" + BOMB), END),
        "broken or truncated PNG",
    ),
    "an iTXt bomb": (
        lambda: png(chunk(b"iTXt", b"k\x00\x01\x00\x00\x00" + BOMB), PIXEL, END),
        "broken or truncated PNG",
    ),
    "an iTXt bomb at the end": (
        lambda: png(PIXEL, chunk(b"iTXt", b"k\x00\x01\x00\x00\x00" + BOMB), END),
        "broken or truncated PNG",
    ),
    "an iCCP bomb": (
        lambda: png(chunk(b"iCCP", b"k\x00\x00" + BOMB), PIXEL, END),
        "broken or truncated PNG",
    ),
    "many text bombs": (
        lambda: png(chunk(b"zTXt", b"k\x00\x00" + zlib.compress(bytes(2**20))) * 100, PIXEL, END),
        "broken or truncated PNG",
    ),
    "many empty chunks": (
        lambda: png(chunk(b"tEXt", b"k\x00") * 900_000, PIXEL, END),
        "too many chunks",
    ),
    "many empty pieces of data": (
        lambda: png(PIXEL, chunk(b"IDAT") * 900_000, END),
        "too many chunks",
    ),
    "a broken animation": (lambda: png(chunk(b"acTL", bytes(8)), PIXEL, END), ""),
    "a truncated PNG": (lambda: cut("PNG"), "broken or truncated PNG"),
    "a truncated JPEG": (lambda: cut("JPEG"), "broken or truncated JPEG"),
    "a truncated WEBP": (lambda: cut("WEBP"), "broken or truncated WEBP"),
    "a truncated GIF": (lambda: cut("GIF"), "broken or truncated GIF"),
    "a truncated BMP": (lambda: cut("BMP"), "broken or truncated BMP"),
    "a JPEG's magic alone": (lambda: b"\xff\xd8\xff", "ends before its pixels"),
    "a huge JPEG": (lambda: jpeg(65_000, 65_000), "65000 x 65000 pixels"),
    "a JPEG with no height": (lambda: jpeg(0, 9), "no pixels"),
    "a JPEG of fill bytes": (lambda: b"\xff\xd8" + b"\xff" * 20_000_000, "ends before its pixels"),
    "a JPEG of fill bytes and zeros": (
        lambda: b"\xff\xd8" + b"\xff" * 10_000_000 + bytes(10_000_000),
        "ends before its pixels",
    ),
    "a JPEG of many segments": (
        lambda: jpeg(1, 1, b"\xff\xe5\x00\x02" * 5_000_000),
        "too many segments",
    ),
    "a JPEG of many scans": (many_scans, "more than 64 scans"),
    "a JPEG of many large EXIFs": (
        lambda: jpeg(1, 1, b"\xff\xe1\xff\xffExif\x00\x00" + bytes(65527)),
        "broken or truncated JPEG",
    ),
    "a huge WEBP": (lambda: webp(2**24, 255), "16777216 x 255 pixels"),
    "a WEBP of another chunk": (lambda: b"RIFF\x04\x00\x00\x00WEBPXXXX", "broken WEBP"),
    "a WEBP's magic alone": (lambda: b"RIFF\x04\x00\x00\x00WEBPVP8X", "cut short"),
    "a GIF of many frames": (many_frames, ""),
    "a GIF with a huge frame": (lambda: gif(b"", 60_000, 60_000), "60000 x 60000 pixels"),
    "a GIF with a frame far away": (
        lambda: gif(b"", 1000, 60_000, left=64_000),
        "65000 x 60000 pixels",
    ),
    "a GIF of a long comment": (
        lambda: gif(b"!\xfe" + (b"\xff" + b"c" * 255) * 90_000 + b"\x00"),
        "too many blocks",
    ),
    "a GIF of many comments": (lambda: gif(b"!\xfe\x01c\x00" * 5_000_000), "too many blocks"),
    "a GIF's magic alone": (lambda: b"GIF89a", "cut short"),
    "a GIF without frames": (lambda: gif(b"")[:19] + b";", "broken GIF"),
    "a huge BMP": (lambda: bmp(50_000, -50_000), "50000 x 50000 pixels"),
    "a BMP of no width": (lambda: bmp(-5, 5), "no pixels"),
    "a BMP of run lengths": (lambda: bmp(6000, 6000, 1), "run lengths"),
    "a BMP's magic alone": (lambda: b"BM", "cut short"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name: str) -> None:
    make, message = BOMBS[name]
    data = make()
    start = cpu_seconds()
    if message:
        with pytest.raises(RequestError, match=message) as caught:
            open_image(data, LIMITS, label="image 2")
        assert str(caught.value).startswith("image 2: ")
        assert len(str(caught.value)) < 200
    else:
        assert open_image(data, LIMITS).ndim == 3
    assert cpu_seconds() - start < SECONDS


def test_bombs_take_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in (
        "a huge PNG",
        "a huge JPEG",
        "a huge WEBP",
        "a GIF with a huge frame",
        "a huge BMP",
    ):
        with pytest.raises(RequestError):
            open_image(BOMBS[name][0](), LIMITS)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_no_warning_at_the_highest_limit() -> None:
    limits = MediaLimits(max_pixels=89_478_485)
    with (
        warnings.catch_warnings(record=True) as caught,
        pytest.raises(RequestError, match="truncated"),
    ):
        open_image(png(END, width=9400, height=9500), limits)
    assert not caught


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_flipped_bytes_are_a_picture_or_a_request_error(format: str) -> None:
    rng = np.random.default_rng(1)
    data = noise(format, size=24)
    for _ in range(200):
        broken = bytearray(data)
        for place in rng.integers(0, min(len(data), 400), 3):
            broken[place] = rng.integers(0, 256)
        try:
            open_image(bytes(broken), MediaLimits(max_pixels=1_000_000))
        except RequestError as error:
            assert str(error).startswith("image: ")
