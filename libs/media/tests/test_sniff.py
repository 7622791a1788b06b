"""The modality of a file, by its first bytes."""

from __future__ import annotations

import io

import pytest
from movies import animation, movie
from PIL import Image
from toolkit_lm_media.data_url import beginning
from toolkit_lm_media.sniff import modality_of


def picture(kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
def test_pictures(kind: str) -> None:
    assert modality_of(picture(kind)[:12]) == "image"


def test_animations_are_pictures_and_movies_are_videos() -> None:
    assert modality_of(animation("GIF")) == "image"
    assert modality_of(movie()[:12]) == "video"


@pytest.mark.parametrize(
    "head", [b"RIFF\0\0\0\0WAVE", b"ID3\4", b"fLaC", b"OggS\0", b"\xff\xfb\x90"]
)
def test_recordings(head: bytes) -> None:
    assert modality_of(head) == "audio"


@pytest.mark.parametrize("head", [b"", b"%PDF-1.7", b"PK\3\4", b"<svg>", b"RIFF\0\0\0\0AVI ", b"B"])
def test_others(head: bytes) -> None:
    assert modality_of(head) is None


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("data:image/png;base64,QUJDREVG", b"ABCDEF"),
        ("DATA:;base64,QUJD" + "!" * 10_000, b"ABC"),
        ("data:;base64,QUJDR" + "!" * 10_000, b""),
        ("http://a/b,QUJD", b""),
        ("data:" + "a" * 10_000 + ",QUJD", b""),
    ],
)
def test_the_beginning_of_a_data_url(url: str, found: bytes) -> None:
    assert beginning(url) == found


def test_no_more_of_a_data_url_is_decoded() -> None:
    assert beginning("data:;base64," + "QUJD" * 10_000 + "!", 12) == b"ABCABCABCABC"
