"""Pictures become arrays as Pillow decodes them, whatever their format, mode and orientation."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin
from toolkit_lm.errors import RequestError
from toolkit_lm_media.image import image_size, open_image
from toolkit_lm_media.limits import MediaLimits

LIMITS = MediaLimits()
MODES = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA"),
    "JPEG": ("L", "RGB", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("L", "P"),
    "BMP": ("1", "L", "P", "RGB", "RGBA"),
}
BROKEN_EXIF = (
    b"Exif\x00\x00",
    b"Exif\x00\x00II*\x00\xff\xff\xff\xff",
    b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\xff\xff",
    b"no",
)
RNG = np.random.default_rng(0)


def picture(mode: str = "RGB", width: int = 13, height: int = 7) -> Image.Image:
    if mode == "I;16":
        return Image.fromarray(RNG.integers(0, 2**16, (height, width), dtype=np.uint16))
    return Image.fromarray(
        RNG.integers(0, 256, (height, width, 4), dtype=np.uint8), "RGBA"
    ).convert(mode)


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def by_pillow(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        # It warns that RGB has no room for a palette's transparency.
        image.info.pop("transparency", None)
        return np.array(ImageOps.exif_transpose(image).convert("RGB"))


@pytest.mark.parametrize("format", MODES)
def test_a_size_is_read_of_a_beginning(format: str) -> None:
    data = encoded(picture("RGB", 640, 480), format)
    assert image_size(data) == image_size(data[:2048]) == (640, 480)
    assert image_size(data[:9]) is image_size(b"") is None


@pytest.mark.parametrize(
    ("format", "mode"), [(format, mode) for format, modes in MODES.items() for mode in modes]
)
def test_each_format_and_mode_is_as_pillow_has_it(format: str, mode: str) -> None:
    data = encoded(picture(mode), format)
    got = open_image(data, LIMITS)
    assert got.dtype == np.uint8
    assert got.shape == (7, 13, 3)
    assert got.flags.writeable
    assert got.flags.c_contiguous
    np.testing.assert_array_equal(got, by_pillow(data))


@pytest.mark.parametrize(
    "options", [{"progressive": True}, {"comment": b"c" * 60000}, {"icc_profile": b"i" * 200_000}]
)
def test_jpegs_with_more_in_them(options: dict[str, object]) -> None:
    data = encoded(picture(width=99, height=55), "JPEG", **options)
    np.testing.assert_array_equal(open_image(data, LIMITS), by_pillow(data))


@pytest.mark.parametrize(
    "options", [{"lossless": True}, {"save_all": True, "append_images": [picture()]}]
)
def test_webps_of_each_kind(options: dict[str, object]) -> None:
    data = encoded(picture(), "WEBP", **options)
    np.testing.assert_array_equal(open_image(data, LIMITS), by_pillow(data))


def test_a_palette_with_transparency_warns_of_nothing() -> None:
    image = picture("P")
    data = encoded(image, "PNG", transparency=bytes(range(200)))
    np.testing.assert_array_equal(open_image(data, LIMITS), np.array(image.convert("RGB")))


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP"])
def test_the_first_frame_of_an_animation(format: str) -> None:
    frames = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in (0, 120, 240)]
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:])
    assert open_image(data, LIMITS).max() == 0


def test_a_gif_with_a_comment_and_a_transparent_colour() -> None:
    data = encoded(picture("P"), "GIF", comment=b"c" * 5000, transparency=3)
    np.testing.assert_array_equal(open_image(data, LIMITS), by_pillow(data))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_the_right_way_up(format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x010F] = "a maker"
    exif[0x0112] = orientation
    data = encoded(picture(), format, exif=exif)
    np.testing.assert_array_equal(open_image(data, LIMITS), by_pillow(data))


@pytest.mark.parametrize("format", ["JPEG", "WEBP"])
def test_the_right_way_up_by_xmp(format: str) -> None:
    data = encoded(picture(), format, xmp=b'<x tiff:Orientation="6"/>')
    np.testing.assert_array_equal(open_image(data, LIMITS), by_pillow(data))
    assert open_image(data, LIMITS).shape == (13, 7, 3)


def test_the_right_way_up_by_png_texts() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    raw = b"Exif\x00\x00" + exif.tobytes().removeprefix(b"Exif\x00\x00")
    for key, text in {
        "Raw profile type exif": f"\nexif\n{len(raw)}\n{raw.hex()}",
        "XML:com.adobe.xmp": 'tiff:Orientation="6"',
    }.items():
        info = PngImagePlugin.PngInfo()
        info.add_itxt(key, text) if key.startswith("XML") else info.add_text(key, text)
        data = encoded(picture(), "PNG", pnginfo=info)
        np.testing.assert_array_equal(open_image(data, LIMITS), by_pillow(data))
        assert open_image(data, LIMITS).shape == (13, 7, 3)


@pytest.mark.parametrize("exif", BROKEN_EXIF)
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_broken_exif_turns_nothing(format: str, exif: bytes) -> None:
    assert open_image(encoded(picture(), format, exif=exif), LIMITS).shape == (7, 13, 3)


def test_threads_share_nothing() -> None:
    files = [encoded(picture(width=n), format) for n in range(1, 30) for format in MODES]
    expected = [by_pillow(data) for data in files]
    with ThreadPoolExecutor(4) as pool:
        for got, want in zip(
            pool.map(lambda data: open_image(data, LIMITS), files), expected, strict=True
        ):
            np.testing.assert_array_equal(got, want)


def test_errors_name_the_item_and_the_parameter() -> None:
    with pytest.raises(
        RequestError,
        match=re.escape("image 2: it is not a picture of a known format; known: BMP, GIF, JPEG"),
    ) as caught:
        open_image(b"text", LIMITS, label="image 2", param="messages")
    assert caught.value.param == "messages"
    assert caught.value.__cause__ is None


def test_the_package_is_light() -> None:
    code = (
        "import toolkit_lm_media, sys, json; print(json.dumps([m for m in ('PIL', 'numpy', "
        "'httpx') if m in sys.modules]))"
    )
    assert (
        json.loads(
            subprocess.run(
                [sys.executable, "-c", code], capture_output=True, check=True, timeout=60
            ).stdout
        )
        == []
    )
