"""Videos become frames as their decoders give them, and no more frames are in memory than one."""

from __future__ import annotations

import gc
import importlib.util
import io
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from movies import animation, decoded, movie, pictures, still
from PIL import Image
from toolkit_lm.errors import ConfigError, RequestError
from toolkit_lm_media.image import open_image
from toolkit_lm_media.limits import MediaLimits
from toolkit_lm_media.video import open_video

LIMITS = MediaLimits()
MOVIES = [
    ("mp4", "mpeg4"),
    ("mp4", "libx264"),
    ("mov", "libx264"),
    ("webm", "libvpx"),
    ("webm", "libvpx-vp9"),
]


def frames(
    data: bytes, indices: list[int] | None = None, limits: MediaLimits = LIMITS
) -> list[np.ndarray]:
    with open_video(data, limits) as video:
        return list(video.frames(range(video.num_frames) if indices is None else indices))


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_an_animation(kind: str) -> None:
    data = animation(kind)
    with open_video(data, LIMITS) as video:
        assert (video.num_frames, video.fps) == (12, 4.0)
        found = list(video.frames([0, 3, 4, 11]))
    for pixels, expected in zip(found, [pictures()[n] for n in (0, 3, 4, 11)], strict=True):
        assert pixels.dtype == np.uint8 and pixels.flags.writeable
        np.testing.assert_array_equal(pixels, expected)
    np.testing.assert_array_equal(frames(data, [0])[0], open_image(data, LIMITS))


@pytest.mark.parametrize("disposal", [0, 1, 2, 3])
def test_gifs_that_paint_over(disposal: int) -> None:
    data = animation(disposal=disposal, comment=b"c" * 3000)
    with Image.open(io.BytesIO(data)) as image:
        assert image.n_frames == 12
        for number, pixels in enumerate(frames(data)):
            image.seek(number)
            np.testing.assert_array_equal(pixels, np.array(image.convert("RGB")))


def test_how_fast_frames_come() -> None:
    def fps(data: bytes) -> float:
        with open_video(data, LIMITS) as video:
            return video.fps

    assert fps(animation(duration=[100, 300] * 6)) == 5.0
    # Browsers do the same: a frame with a duration of zero is shown for a tenth of a second.
    assert fps(animation(duration=0)) == fps(animation("WEBP", duration=10)) == 10.0
    assert fps(still("GIF")) == 10.0
    assert fps(movie(rate=25)) == 25.0


def test_a_palette_with_transparency_warns_of_nothing() -> None:
    images = [Image.fromarray(pixels).convert("P") for pixels in pictures()]
    file = io.BytesIO()
    images[0].save(file, "GIF", save_all=True, append_images=images[1:], transparency=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(frames(file.getvalue())) > 1


@pytest.mark.parametrize(("format", "codec"), MOVIES)
def test_a_movie(format: str, codec: str) -> None:
    data = movie(format, codec)
    with open_video(data, LIMITS) as video:
        assert (video.num_frames, video.fps) == (12, 4.0)
        found = list(video.frames([1, 2, 11]))
    expected = decoded(data)
    assert len(expected) == 12
    for pixels, number in zip(found, (1, 2, 11), strict=True):
        assert pixels.dtype == np.uint8 and pixels.flags.writeable
        np.testing.assert_array_equal(pixels, expected[number])


@pytest.mark.parametrize("flags", ["frag_keyframe+empty_moov", "faststart"])
def test_fragments_of_a_movie(flags: str) -> None:
    data = movie(movflags=flags)
    for pixels, expected in zip(frames(data), decoded(data), strict=True):
        np.testing.assert_array_equal(pixels, expected)


def test_a_movie_of_a_telephone_that_lies_on_its_side() -> None:
    """Its track's matrix turns it."""
    data = movie()
    upright = data.index(b"tkhd") + 44
    one, minus, zero = (number.to_bytes(4, "big", signed=True) for number in (65536, -65536, 0))
    turned = data[:upright] + b"".join([zero, one, zero, minus, zero, zero]) + data[upright + 24 :]
    for pixels, expected in zip(frames(turned), decoded(data), strict=True):
        np.testing.assert_array_equal(pixels, np.rot90(expected, -1))


def test_a_movie_with_sound_and_no_pictures() -> None:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(
            np.zeros((1, 1024), np.float32), format="fltp", layout="mono"
        )
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(RequestError, match="video: it has no pictures"):
        frames(file.getvalue())


def test_frames_that_are_not_taken_to_the_end() -> None:
    """The decoder's process ends."""
    with open_video(movie(), LIMITS) as video:
        process = video._decoder._process
        next(video.frames([0, 5]))
        assert process.poll() is None
    assert process.returncode is not None
    gc.collect()


def test_errors_in_the_body_are_the_callers() -> None:
    with pytest.raises(RequestError, match=r"^mine$"), open_video(animation(), LIMITS):
        raise RequestError("mine")


def test_without_the_decoder_of_movies(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "av" else found(name)
    )
    with (
        pytest.raises(
            RequestError, match=r"video 2: movies are not read here.*toolkit-lm-media\[video\]"
        ),
        open_video(movie(), LIMITS, label="video 2"),
    ):
        pass
    assert len(frames(animation())) == 12


def test_animations_load_no_decoder_of_movies() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from toolkit_lm_media.video import "
        "open_video;"
        "from toolkit_lm_media.limits import MediaLimits; data = open(sys.argv[2], 'rb').read()\n"
        "with open_video(data, MediaLimits()) as video: assert len(list(video.frames([0, 5]))) "
        "== 2\n"
        "assert 'av' not in sys.modules and 'httpx' not in sys.modules"
    )
    path = Path(__file__).with_name("animation.gif")
    try:
        path.write_bytes(animation())
        subprocess.run(
            [sys.executable, "-c", code, str(path.parent), str(path)], check=True, timeout=60
        )
    finally:
        path.unlink()


def test_threads_share_nothing() -> None:
    files = [animation("GIF"), animation("WEBP"), movie(), movie("webm", "libvpx")] * 3
    expected = [frames(data) for data in files[:4]] * 3
    with ThreadPoolExecutor(4) as pool:
        for got, want in zip(pool.map(frames, files), expected, strict=True):
            np.testing.assert_array_equal(got, want)


def test_limits_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="max_frames"):
        MediaLimits(max_frames=0)
    with pytest.raises(ConfigError, match="max_seconds"):
        MediaLimits(max_seconds=0)
