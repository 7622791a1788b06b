"""Hostile videos: each a RequestError that names the item, within a second, and without memory."""

from __future__ import annotations

import resource
import struct
from collections.abc import Callable

import numpy as np
import pytest
from movies import animation, movie, pictures, still
from sounds import cpu_seconds
from toolkit_lm.errors import RequestError
from toolkit_lm_media.limits import MediaLimits
from toolkit_lm_media.video import open_video

LIMITS = MediaLimits()
SECONDS = 1.0
"""Processor seconds of this process, and of those it has started for the item."""
FRAME = b"," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"


def gif_of(width: int, height: int, body: bytes, end: bytes = b";") -> bytes:
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6) + body + end


def webp_of(width: int, height: int, frames: int) -> bytes:
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    chunks = (
        b"VP8X"
        + struct.pack("<I", 10)
        + bytes(4)
        + size
        + (b"ANMF" + struct.pack("<I", 16) + bytes(16)) * frames
    )
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WEBP" + chunks


def patched(data: bytes, name: bytes, offset: int, new: bytes) -> bytes:
    """With other bytes in the box `name`."""
    place = data.index(name) + 4 + offset
    return data[:place] + new + data[place + len(new) :]


def one_size(count: int) -> bytes:
    """A movie whose samples are said to be so many, all of one size."""
    return patched(movie(), b"stsz", 4, struct.pack(">II", 1, count))


def wide(width: int, height: int) -> bytes:
    """A movie whose header says another size than its pictures have."""
    return patched(movie(), b"mp4v", 24, struct.pack(">HH", width, height))


def huge(width: int, height: int) -> bytes:
    data = movie("webm", "libvpx")
    place = data.index(b"\x9d\x01\x2a") + 3
    return data[:place] + struct.pack("<HH", width, height) + data[place + 4 :]


def hidden(width: int, height: int) -> bytes:
    """A movie whose pictures have another size than its header says."""
    large = movie(codec="libx264", frames=pictures(3, 1920, 1080))
    return patched(large, b"avc1", 24, struct.pack(">HH", width, height))


def endless() -> bytes:
    """A fragment that is said to have four thousand million samples without a byte."""
    data = movie(movflags="frag_keyframe+empty_moov")
    data = patched(data, b"trun", 0, bytes(4))
    return patched(data, b"trun", 4, b"\xff\xff\xff\xff")


def broken(format: str, codec: str) -> bytes:
    data = bytearray(
        movie(
            format,
            codec,
            [np.random.default_rng(n).integers(0, 255, (64, 64, 3), np.uint8) for n in range(8)],
        )
    )
    middle = (
        slice(len(data) // 4, len(data) // 2)
        if format == "webm"
        else slice(data.index(b"mdat") + 40, data.index(b"mdat") + 2000)
    )
    data[middle] = bytes(len(data[middle]))
    return bytes(data)


LIES = "movie|memory|within bounds|frames|pictures are broken"
BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "it is empty"),
    "too many bytes": (lambda: b"GIF89a" + bytes(LIMITS.max_bytes), "more than the 25 MiB"),
    "text": (lambda: b"this is no video.mp4", "not a video of a known format"),
    "a PNG": (lambda: still("PNG"), "not a video of a known format"),
    "a JPEG": (lambda: still("JPEG"), "not a video of a known format"),
    "a list of files": (
        lambda: b"#EXTM3U\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:1,\nfile:///etc/passwd\n",
        "not a video of a known format",
    ),
    "files to join": (
        lambda: b"ffconcat version 1.0\nfile /etc/passwd\n",
        "not a video of a known format",
    ),
    "an AVI": (lambda: movie("avi"), "not a video of a known format"),
    "a huge GIF": (lambda: gif_of(60_000, 60_000, FRAME * 2), "60000 x 60000 pixels"),
    "a GIF of huge frames": (
        lambda: gif_of(1, 1, FRAME[:5] + b"\x60\xea\x60\xea" + FRAME[9:]),
        "60000 x 60000 pixels",
    ),
    "a GIF whose second frame is huge": (
        lambda: gif_of(1, 1, FRAME + FRAME[:5] + b"\xff\xff\xff\xff" + FRAME[9:]),
        "two sizes",
    ),
    "a GIF of many frames": (lambda: gif_of(1, 1, FRAME * 1_000_000), "more than 16384 frames"),
    "a GIF of many large frames": (
        lambda: gif_of(5000, 5000, FRAME * 1000),
        "1000 frames of 5000 x 5000 pixels",
    ),
    "a GIF of many blocks": (
        lambda: gif_of(1, 1, b"!\xfe" + b"\x01c" * 10_000_000 + b"\x00" + FRAME),
        "too many blocks",
    ),
    "a GIF of many comments": (
        lambda: gif_of(1, 1, FRAME + b"!\xfe\x01c\x00" * 5_000_000),
        "too many blocks",
    ),
    "a GIF without an end": (lambda: gif_of(1, 1, FRAME * 3, b""), ""),
    "a GIF that lasts for hours": (
        lambda: gif_of(1, 1, (b"!\xf9\x04\x00\xff\xff\x00\x00" + FRAME) * 6),
        "seconds, more than the 3600",
    ),
    "a truncated GIF": (lambda: animation()[:-40], "cut short|broken or truncated"),
    "a GIF's magic alone": (lambda: b"GIF89a", "cut short"),
    "a GIF of other bytes": (lambda: gif_of(1, 1, FRAME + bytes(100)), "broken GIF"),
    "a GIF without frames": (lambda: gif_of(1, 1, b""), "without frames"),
    "a GIF whose blocks are not there": (lambda: gif_of(1, 1, FRAME + FRAME[:-4]), "cut short"),
    "a GIF whose second frame cannot be read": (
        lambda: gif_of(1, 1, FRAME + FRAME[:10] + b"\x20\x01\x00\x00"),
        "broken or truncated GIF",
    ),
    "a huge WEBP": (lambda: webp_of(2**14, 2**14, 3), "16384 x 16384 pixels"),
    "a WEBP of many frames": (lambda: webp_of(1, 1, 500_000), "too many chunks"),
    "a WEBP of many large frames": (
        lambda: webp_of(5000, 5000, 1000),
        "1000 frames of 5000 x 5000 pixels",
    ),
    "a WEBP of broken frames": (lambda: webp_of(5000, 5000, 2), "broken or truncated WEBP"),
    "a truncated WEBP": (lambda: animation("WEBP")[:-40], "cut short|broken or truncated WEBP"),
    "a WEBP's magic alone": (lambda: b"RIFF\x04\x00\x00\x00WEBPVP8X", "cut short"),
    "an MP4's magic alone": (lambda: b"\x00\x00\x00\x08ftyp", "broken or truncated movie"),
    "an MP4 of zeros": (
        lambda: b"\x00\x00\x00\x08ftyp" + bytes(10_000_000),
        "broken or truncated movie",
    ),
    "an MP4 of empty boxes": (lambda: b"\x00\x00\x00\x08free" * 3_000_000, "too many boxes"),
    "an MP4 of boxes in boxes": (
        lambda: b"".join(struct.pack(">I", 800_000 - 8 * n) + b"moov" for n in range(100_000)),
        "movie",
    ),
    "a truncated MP4": (lambda: movie()[:-200], "truncated movie"),
    "an MP4 without data": (
        lambda: movie(movflags="faststart").partition(b"mdat")[0][:-4],
        "its pictures are broken",
    ),
    "a broken MP4": (lambda: broken("mp4", "libx264"), "broken or truncated movie"),
    "an MP4 that says it is huge": (lambda: wide(60_000, 60_000), ""),
    "a WEBM that is huge": (lambda: huge(16_383, 16_383), "broken or truncated movie"),
    "an MP4 that is larger than it says": (lambda: hidden(16, 16), ""),
    "an MP4 of as many samples as there are numbers": (lambda: one_size(2**32 - 1), LIES),
    "an MP4 of a hundred million samples": (lambda: one_size(10**8), LIES),
    "an MP4 of ten million samples": (lambda: one_size(10**7), LIES),
    "an MP4 of endless fragments": (endless, LIES),
    "a WEBM's magic alone": (lambda: b"\x1a\x45\xdf\xa3", "cut short"),
    "a WEBM of zeros": (lambda: b"\x1a\x45\xdf\xa3" + bytes(1_000_000), "broken movie"),
    "a truncated WEBM": (lambda: movie("webm", "libvpx")[:-200], "truncated movie"),
    "a broken WEBM": (lambda: broken("webm", "libvpx"), "movie"),
    "an MKV of another codec": (lambda: movie("matroska", "ffv1"), "its codec is not read"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name: str) -> None:
    make, message = BOMBS[name]
    data = make()
    start = cpu_seconds()
    if message:
        with (
            pytest.raises(RequestError, match=message) as caught,
            open_video(data, LIMITS, label="video 2") as video,
        ):
            list(video.frames(range(video.num_frames)))
        assert str(caught.value).startswith("video 2: ")
        assert len(str(caught.value)) < 200
    else:
        with open_video(data, LIMITS) as video:
            assert sum(1 for _ in video.frames(range(video.num_frames))) == video.num_frames
    assert cpu_seconds() - start < SECONDS


def test_bombs_take_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in (
        "a huge GIF",
        "a GIF of many large frames",
        "a huge WEBP",
        "a WEBM that is huge",
        "an MP4 of endless fragments",
    ):
        with pytest.raises(RequestError), open_video(BOMBS[name][0](), LIMITS) as video:
            list(video.frames(range(video.num_frames)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_bounds_of_the_caller() -> None:
    """Bounds of pixels, of all pixels and of seconds are checked by the header."""
    for data in (animation(), animation("WEBP"), movie(), movie("webm", "libvpx")):
        for limits, message in (
            (MediaLimits(max_bytes=100), "more than the 100 bytes"),
            (MediaLimits(max_pixels=1000), "more than the 1000"),
            (MediaLimits(max_seconds=2.5), "3 seconds, more than the 2.5"),
        ):
            with pytest.raises(RequestError, match=message), open_video(data, limits):
                pass
    many = movie(frames=pictures(12) * 10)
    with (
        pytest.raises(RequestError, match="more than 64 frames of 48 x 32 pixels"),
        open_video(many, MediaLimits(max_pixels=48 * 32)),
    ):
        pass


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_flipped_bytes_are_frames_or_a_request_error(kind: str) -> None:
    flip(animation(kind, pictures(4)), 200)


@pytest.mark.parametrize(("format", "codec"), [("mp4", "libx264"), ("webm", "libvpx-vp9")])
def test_flipped_bytes_of_movies(format: str, codec: str) -> None:
    flip(movie(format, codec), 15)


def flip(data: bytes, times: int) -> None:
    rng = np.random.default_rng(1)
    for _ in range(times):
        changed = bytearray(data)
        for place in rng.integers(0, len(data), 3):
            changed[place] = rng.integers(0, 256)
        try:
            with open_video(bytes(changed), MediaLimits(max_pixels=1_000_000)) as video:
                for _ in video.frames(range(video.num_frames)):
                    pass
        except RequestError as error:
            assert str(error).startswith("video: ")
