"""Recordings: decoded, mixed to one channel and resampled."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from sounds import encoded, sound, tone
from toolkit_lm.errors import ConfigError, RequestError
from toolkit_lm_media.audio import open_audio
from toolkit_lm_media.limits import MediaLimits

LIMITS = MediaLimits()


def read(data: bytes, rate: int = 16000) -> np.ndarray:
    with open_audio(data, LIMITS) as audio:
        return audio.read(rate)


@pytest.mark.parametrize(
    ("format", "rate", "channels", "options"),
    [
        ("FLAC", 44100, 2, {}),
        ("OGG", 48000, 1, {}),
        ("OGG", 48000, 2, {"subtype": "OPUS"}),
        ("MP3", 22050, 2, {}),
        ("WAV", 8000, 1, {}),
        ("WAV", 44100, 8, {"subtype": "FLOAT"}),
        ("WAVEX", 16000, 1, {}),
    ],
)
def test_files_are_decoded_and_resampled(format, rate, channels, options):
    data = sound(format, rate=rate, channels=channels, **options)
    with open_audio(data, LIMITS) as audio:
        assert audio.seconds == pytest.approx(1.0, abs=1e-6)
        assert audio.format == format.removesuffix("EX")
        found = audio.read(16000)
    assert found.dtype == np.float32 and len(found) == pytest.approx(16000, rel=0.001)
    spectrum = np.abs(np.fft.rfft(found))
    assert spectrum.argmax() * 16000 / len(found) == pytest.approx(440, abs=2)


def test_samples_of_the_same_rate_are_what_they_were():
    samples = tone(0.3)[:, 0].astype(np.float32)
    assert np.array_equal(read(encoded(samples, subtype="FLOAT")), samples)


def test_channels_are_averaged():
    left = tone(0.1)[:, 0]
    right = tone(0.1, hertz=300)[:, 0]
    found = read(encoded(np.stack([left, right], axis=1), subtype="FLOAT"))
    assert np.allclose(found, (left + right) / 2, atol=1e-6)


def test_a_wav_that_was_written_to_a_pipe():
    data = sound()
    place = data.index(b"data") + 4
    assert len(read(data[:place] + struct.pack("<I", 2**32 - 1) + data[place + 4 :])) == 16000


def test_a_wav_with_other_chunks_around():
    data = sound()
    place = data.index(b"data")
    data = (
        data[:place]
        + b"LIST"
        + struct.pack("<I", 3)
        + b"abc\0"
        + data[place:]
        + b"LIST"
        + struct.pack("<I", 2)
        + b"ab"
    )
    assert len(read(data)) == 16000


def loud_at_the_end(channels: int, rate: int) -> np.ndarray:
    """Its bit rate varies: a first frame says little of the others."""
    quiet = np.zeros((rate * 2, channels))
    loud = np.random.default_rng(0).uniform(-0.5, 0.5, (rate * 2, channels))
    return np.concatenate([quiet, loud])


@pytest.mark.parametrize(
    ("rate", "channels"), [(44100, 2), (48000, 1), (22050, 2), (16000, 1), (8000, 1)]
)
@pytest.mark.parametrize("tag", [b"", b"ID3\4\0\0\0\0\0\x0a" + bytes(10)], ids=["bare", "tagged"])
@pytest.mark.parametrize("reverse", [False, True], ids=["quiet first", "loud first"])
def test_an_mp3_that_does_not_say_how_long_it_is(rate, channels, tag, reverse):
    samples = loud_at_the_end(channels, rate)
    whole = encoded(samples[::-1] if reverse else samples, "MP3", rate)
    # Its first frame says it, and is no sound.
    bare = tag + whole[whole.index(whole[:2], 4) :]
    expected = read(whole, rate)
    with open_audio(bare, LIMITS) as audio:
        assert audio.seconds == pytest.approx(4.0, abs=4 * 1152 / rate)
        found = audio.read(rate)
    # Silence that encoders add before the sound is not removed.
    shift = len(found) - len(expected)
    assert 0 <= shift < 4 * 1152
    best = min(
        float(np.abs(found[i : i + len(expected)] - expected)[rate : rate * 3].mean())
        for i in range(shift + 1)
    )
    assert best < 1e-3


def test_an_mp3_that_does_not_say_it_is_counted_no_further_than_it_is_taken():
    whole = sound("MP3", 3.0)
    bare = whole[whole.index(whole[:2], 4) :]
    with (
        pytest.raises(RequestError, match=r"more than the 1 that are taken"),
        open_audio(bare, MediaLimits(max_audio_seconds=1)),
    ):
        pass


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_seconds_that_make_no_sense(seconds):
    with pytest.raises(ConfigError, match="max_audio_seconds"):
        MediaLimits(max_audio_seconds=seconds)


def test_errors_name_the_item_and_the_parameter():
    item = b"GIF89a" + bytes(20)
    told = r"^audio 3: it is an image, and no recording"
    with (
        pytest.raises(RequestError, match=told) as caught,
        open_audio(item, LIMITS, label="audio 3", param="messages"),
    ):
        pass
    assert caught.value.param == "messages"
