"""Every mode and every format of Pillow, against transformers' own loading of pictures."""

from __future__ import annotations

import base64
import contextlib
import io
import warnings

import numpy as np
import pytest
from PIL import Image, features
from toolkit_lm.errors import RequestError
from toolkit_lm_media.image import open_image
from toolkit_lm_media.limits import MediaLimits
from toolkit_lm_media.modes import to_rgb
from toolkit_lm_media.refusal import RefusedError

LIMITS = MediaLimits()
READ = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
HIGH = tuple(mode for mode in Image.MODES if mode.startswith("I;16"))
"""Modes in which transformers clips values, through Pillow: only there do the two differ."""
RNG = np.random.default_rng(1)
SAMPLES = RNG.integers(0, 256, (9, 14, 4), dtype=np.uint8)
Image.init()


def of_transformers(data: bytes) -> np.ndarray:
    from transformers.image_utils import load_image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.array(load_image(base64.b64encode(data).decode()))


def picture(mode: str) -> Image.Image:
    """Picture with samples of all values of an 8-bit mode."""
    if mode in HIGH:
        dtype = ">u2" if mode == "I;16B" else "<u2"
        return Image.frombytes(
            mode, (14, 9), RNG.integers(0, 2**16, (9, 14)).astype(dtype).tobytes()
        )
    if mode in ("I", "F"):
        return Image.fromarray(SAMPLES[..., 0].astype("int32" if mode == "I" else "float32"))
    image = Image.fromarray(SAMPLES, "RGBA")
    match mode:
        case "La":
            return image.convert("LA").convert("La")
        case "PA":
            return image.convert("RGB").quantize(16).convert("PA")
        case "LAB" | "HSV" | "YCbCr":
            return (
                image.convert("RGB").convert(mode)
                if mode != "LAB"
                else Image.frombytes(mode, (14, 9), SAMPLES[..., :3].tobytes())
            )
        case "RGBa":
            return image.convert("RGBa")
        case _:
            return image.convert(mode) if mode != "CMYK" else image.convert("RGB").convert("CMYK")


@pytest.mark.parametrize("mode", Image.MODES)
def test_every_mode(mode):
    image = picture(mode)
    assert image.mode == mode
    got = np.array(to_rgb(image))
    assert got.shape == (9, 14, 3) and got.dtype == np.uint8
    if mode in HIGH:
        expected = np.repeat((np.asarray(image).astype(np.int64) // 256)[..., None], 3, axis=2)
    else:
        from transformers.image_utils import load_image

        expected = np.array(load_image(image.convert("LA") if mode == "La" else image))
    np.testing.assert_array_equal(got, expected)


def files(format: str) -> list[bytes]:
    """Files of all modes that Pillow writes in a format."""
    written = []
    for mode in Image.MODES:
        file = io.BytesIO()
        # Some formats have no such mode, and some need a program that is not here.
        with contextlib.suppress(Exception):
            picture(mode).save(file, format)
            written.append(file.getvalue())
    return written


@pytest.mark.parametrize("format", sorted(Image.SAVE))
def test_every_format(format):
    """A file of Pillow's is read as transformers reads it, or refused with the formats that are
    read."""
    found = files(format)
    assert found or format not in READ
    for data in found:
        check_file(format, data)


def check_file(format: str, data: bytes) -> None:
    if not data.startswith((b"\x89PNG", b"\xff\xd8", b"GIF8", b"BM", b"RIFF")):
        assert format not in READ
        with pytest.raises(
            RequestError, match="not a picture of a known format; known: BMP, GIF, JPEG, PNG, WEBP"
        ):
            open_image(data, LIMITS)
        return
    got = open_image(data, LIMITS)
    with Image.open(io.BytesIO(data)) as opened:
        if opened.mode in HIGH:
            expected = np.repeat((np.asarray(opened) // 256)[..., None], 3, axis=2)
        else:
            expected = of_transformers(data)
    np.testing.assert_array_equal(got, expected)


def test_the_formats_that_are_read_are_tried():
    assert set(READ) <= set(Image.SAVE) and features.check("webp")


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("RGBA", {}),
        ("LA", {}),
        ("P", {"transparency": bytes(range(0, 256, 2))}),
        ("P", {"transparency": 3}),
        ("RGB", {"transparency": (1, 2, 3)}),
        ("L", {"transparency": 7}),
        ("1", {"transparency": 1}),
    ],
)
def test_alpha_is_dropped_as_transformers_drops_it(mode, options):
    file = io.BytesIO()
    picture(mode).save(file, "PNG", **options)
    np.testing.assert_array_equal(
        open_image(file.getvalue(), LIMITS), of_transformers(file.getvalue())
    )


def test_what_lies_under_transparent_pixels_is_seen():
    file = io.BytesIO()
    Image.new("RGBA", (2, 2), (200, 30, 40, 0)).save(file, "PNG")
    assert open_image(file.getvalue(), LIMITS)[0, 0].tolist() == [200, 30, 40]


@pytest.mark.parametrize("format", ["PNG", "GIF", "WEBP"])
def test_of_an_animation_the_first_frame(format):
    file = io.BytesIO()
    frames = [picture("RGB"), Image.new("RGB", (14, 9), (9, 9, 9))]
    frames[0].save(file, format, save_all=True, append_images=frames[1:])
    np.testing.assert_array_equal(
        open_image(file.getvalue(), LIMITS), of_transformers(file.getvalue())
    )


def test_sixteen_bits_keep_their_high_byte():
    file = io.BytesIO()
    ramp = np.arange(0, 65536, 256, dtype=np.uint16).reshape(16, 16)
    Image.fromarray(ramp).save(file, "PNG", transparency=512)
    assert open_image(file.getvalue(), LIMITS)[..., 0].ravel().tolist() == list(range(256))


def test_integers_of_more_than_a_byte():
    values = np.array([[0, 256, 65535]], np.int32)
    assert np.array(to_rgb(Image.fromarray(values)))[0, :, 0].tolist() == [0, 1, 255]


@pytest.mark.parametrize("values", [[[0, 65536]], [[-1, 4]]])
def test_integers_of_another_range_are_refused(values):
    with pytest.raises(RefusedError, match="those from 0 to 65535 are read"):
        to_rgb(Image.fromarray(np.array(values, np.int32)))


@pytest.mark.parametrize(
    "values", [[[0.0, 0.5, 1.0]], [[-3.0, 4.0]], [[0.0, 256.0]], [[0.0, float("nan")]]]
)
def test_floats_of_another_range_are_refused(values):
    with pytest.raises(RefusedError, match="those from 0 to 255 are read: scale them"):
        to_rgb(Image.fromarray(np.array(values, np.float32)))
