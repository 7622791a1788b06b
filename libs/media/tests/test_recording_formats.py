"""Every format of recordings that OpenAI's API names, and what phones and browsers write, made by
FFmpeg here."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from sounds import recorded, sound
from toolkit_lm.errors import RequestError
from toolkit_lm_media.audio import open_audio
from toolkit_lm_media.limits import MediaLimits
from toolkit_lm_media.sniff import modality_of
from toolkit_lm_media.sound_formats import format_of

LIMITS = MediaLimits(max_audio_seconds=20)
OPENAI = ("flac", "mp3", "mp4", "mpeg", "mpga", "m4a", "ogg", "wav", "webm")
"""Formats in OpenAI's reference of audio transcriptions."""
FILES = {
    "flac": [("flac", "flac", 44100)],
    "mp3": [("mp3", "libmp3lame", 44100)],
    "mpeg": [("mp3", "libmp3lame", 22050)],
    "mpga": [("mp3", "libmp3lame", 16000)],
    "mp4": [
        ("mp4", "aac", 44100),
        ("mp4", "libopus", 48000),
        ("mp4", "libmp3lame", 44100),
        ("mov", "pcm_s16le", 16000),
    ],
    "m4a": [("ipod", "aac", 48000), ("ipod", "alac", 44100)],
    "ogg": [("ogg", "libopus", 48000)],
    "wav": [("wav", "pcm_s16le", 16000)],
    "webm": [("webm", "libopus", 48000), ("matroska", "aac", 44100)],
    "aac": [("adts", "aac", 44100)],
}
NAMES = {"mp4": "MP4", "m4a": "MP4", "webm": "WEBM", "aac": "AAC", "mpeg": "MP3", "mpga": "MP3"}


def heard(data: bytes, limits: MediaLimits = LIMITS) -> tuple[float, float, float]:
    """The seconds that it says it has, those that it has, and its tone."""
    with open_audio(data, limits) as audio:
        samples = audio.read(16000)
        said = audio.seconds
    assert samples.dtype == np.float32 and samples.ndim == 1
    return (
        said,
        len(samples) / 16000,
        float(np.abs(np.fft.rfft(samples)).argmax() * 16000 / len(samples)),
    )


@pytest.mark.parametrize("name", FILES)
def test_every_format_is_heard(name):
    for container, codec, rate in FILES[name]:
        data = recorded(container, codec, rate)
        said, seconds, tone = heard(data)
        assert seconds == pytest.approx(2, abs=0.1) and said == pytest.approx(seconds, abs=0.1), (
            container,
            codec,
        )
        assert tone == pytest.approx(440, abs=2), (container, codec)
        assert format_of(data) == NAMES.get(name, name.upper())


def test_all_that_openai_names():
    assert set(OPENAI) <= set(FILES)


@pytest.mark.parametrize(("container", "codec"), [("mp4", "aac"), ("webm", "libopus")])
def test_the_sound_of_a_movie(container, codec):
    assert heard(recorded(container, codec, 48000, pictures=True))[2] == pytest.approx(440, abs=2)


@pytest.mark.parametrize(
    ("container", "codec"), [("mp4", "aac"), ("webm", "libopus"), ("adts", "aac")]
)
def test_channels_are_averaged(container, codec):
    assert heard(recorded(container, codec, 48000, channels=2))[2] == pytest.approx(440, abs=2)


def test_a_stream_of_a_browser_that_does_not_say_how_long_it_is():
    said, seconds, _ = heard(recorded("webm", "libopus", 48000, live="1"))
    assert said == pytest.approx(seconds, abs=0.1)


def test_files_of_phones_are_sounds():
    assert (
        modality_of(recorded("ipod", "aac", 44100)[:12])
        == modality_of(recorded("adts", "aac", 44100)[:12])
        == "audio"
    )


@pytest.mark.parametrize(
    ("container", "codec", "rate"),
    [("mp4", "aac", 44100), ("webm", "libopus", 48000), ("adts", "aac", 44100)],
)
class TestBounds:
    def test_too_long(self, container, codec, rate):
        with pytest.raises(
            RequestError, match=r"more than the 3 (seconds )?that are taken \(max_audio_seconds\)"
        ):
            heard(recorded(container, codec, rate, 6.0), MediaLimits(max_audio_seconds=3))

    def test_cut_short(self, container, codec, rate):
        data = recorded(container, codec, rate, 4.0)
        with pytest.raises(RequestError, match="truncated"):
            heard(data[: len(data) // 2])

    def test_other_bytes_inside(self, container, codec, rate):
        data = bytearray(recorded(container, codec, rate))
        data[40:] = bytes(len(data) - 40)
        with pytest.raises(RequestError, match="audio: "):
            heard(bytes(data))

    def test_without_the_decoder(self, container, codec, rate, monkeypatch):
        found = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name == "av" else found(name)
        )
        with pytest.raises(
            RequestError,
            match=r"are not read here: that needs pip install 'toolkit-lm-media\[video\]'",
        ):
            heard(recorded(container, codec, rate))
        assert heard(sound("WAV"))[1] == 1

    def test_its_process_ends(self, container, codec, rate):
        with open_audio(recorded(container, codec, rate), LIMITS) as audio:
            process = audio._decoder._process
            assert process.poll() is None
        assert process.returncode is not None


def test_codecs_that_are_not_named_are_not_opened():
    with pytest.raises(
        RequestError, match=r"its codec is not read|broken or truncated recording|no sound"
    ):
        heard(recorded("mov", "pcm_alaw", 16000))
