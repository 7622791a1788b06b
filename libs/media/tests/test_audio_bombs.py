"""Hostile recordings: each a RequestError that names the item, within a second, and without
memory."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from movies import movie, still
from sounds import cpu_seconds, encoded, sound
from toolkit_lm.errors import RequestError
from toolkit_lm_media.audio import open_audio
from toolkit_lm_media.limits import MediaLimits

LIMITS = MediaLimits()
SECONDS = 1.0
"""Processor seconds of this process, and of those it has started for the item."""


def wav(rate: int = 16000, channels: int = 1, bits: int = 16, **body: Any) -> bytes:
    return riff(
        struct.pack(
            "<HHIIHH", 1, channels, rate, 2 * rate % 2**32, channels * bits // 8 % 2**16, bits
        ),
        **body,
    )


def riff(
    described: bytes, data: bytes = bytes(3200), size: int | None = None, before: bytes = b""
) -> bytes:
    """`size`: of the samples, as it says; `before`: chunks before them."""
    body = b"WAVEfmt " + struct.pack("<I", len(described)) + described + before
    body += b"data" + struct.pack("<I", len(data) if size is None else size) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def flac(count: int, rate: int = 48000, channels: int = 1) -> bytes:
    """One that says it has `count` samples of each channel, at this rate."""
    data = bytearray(sound("FLAC", rate=48000))
    stated = rate << 44 | (channels - 1) << 41 | 15 << 36 | count
    data[18:26] = stated.to_bytes(8, "big")
    return bytes(data)


def cut(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def ogg_of_other_length(granule: int) -> bytes:
    """Its last page says that it ends at this sample. The checksum is mended."""
    data = bytearray(sound("OGG"))
    place = data.rindex(b"OggS")
    data[place + 6 : place + 14] = struct.pack("<q", granule)
    data[place + 22 : place + 26] = bytes(4)
    data[place + 22 : place + 26] = struct.pack("<I", ogg_checksum(bytes(data[place:])))
    return bytes(data)


def ogg_checksum(page: bytes) -> int:
    value = 0
    for byte in page:
        value ^= byte << 24
        for _ in range(8):
            value = value << 1 ^ 0x104C11DB7 if value & 1 << 31 else value << 1
    return value


def empty_pages() -> bytes:
    """An Ogg with as many pages of nothing as it has room for, and an end."""
    data = sound("OGG")
    second = data.index(b"OggS", 4)
    page = b"OggS\0\0" + bytes(8) + data[14:18] + bytes(9)
    last = data.rindex(b"OggS")
    return data[:second] + page * 900_000 + data[last:]


def id3(size: int, data: bytes = b"") -> bytes:
    """A tag that says it has so many bytes."""
    return b"ID3\4\0\0" + bytes(size >> shift & 0x7F for shift in (21, 14, 7, 0)) + data


def not_a_number() -> bytes:
    samples = np.zeros(1000, np.float32)
    samples[500] = np.nan
    return encoded(samples, subtype="FLOAT")


BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "it is empty"),
    "too many bytes": (lambda: b"fLaC" + bytes(LIMITS.max_bytes), "more than the 25 MiB"),
    "text": (
        lambda: b"this is no recording.wav",
        "not a recording of a known format; known: AAC, FLAC, M4A, MP3, MP4, Ogg, WAV, WEBM",
    ),
    "a PNG": (lambda: still("PNG"), "it is an image, and no recording"),
    "a movie": (lambda: movie(), "it has no sound"),
    "a movie in WEBM": (lambda: movie("webm", "libvpx"), "it has no sound"),
    "an AVI": (lambda: movie("avi"), "not a recording of a known format"),
    "an AIFF": (lambda: sound("AIFF"), "not a recording of a known format"),
    "a list of files": (
        lambda: b"#EXTM3U\nfile:///etc/passwd\n",
        "not a recording of a known format",
    ),
    "AAC": (
        lambda: b"\xff\xf1\x50\x80" + bytes(1000),
        "truncated AAC|broken or truncated recording|no samples",
    ),
    "a WAV's magic alone": (lambda: b"RIFF\0\0\0\0WAVE", "truncated WAV: it has no samples"),
    "a WAV without samples": (lambda: wav(data=b""), "it has no samples"),
    "a WAV of no sample": (lambda: wav(data=b"a"), "it has no samples|cannot be read"),
    "a truncated WAV": (lambda: cut(sound()), "truncated WAV: .* of 32000 bytes"),
    "a WAV that says it has gigabytes": (lambda: wav(size=2**32 - 2), "truncated WAV"),
    "a WAV of many chunks": (lambda: wav(before=b"junk\0\0\0\0" * 1_000_000), "too many chunks"),
    "a WAV whose chunk is not there": (
        lambda: wav(before=b"junk\xff\xff\xff\x7f"),
        "truncated WAV",
    ),
    "a WAV at no rate": (lambda: wav(rate=0), "0 samples a second|cannot be read"),
    "a WAV at a slow rate": (lambda: wav(rate=10), "states 10 samples a second; 1,000 to 384,000"),
    "a WAV at a fast rate": (lambda: wav(rate=2**31 - 1), "samples a second; 1,000 to 384,000"),
    "a WAV of no channel": (lambda: wav(channels=0), "0 channels|cannot be read"),
    "a WAV of many channels": (
        lambda: wav(channels=9, data=bytes(18 * 100)),
        "it has 9 channels; up to 8",
    ),
    "a WAV of 65535 channels": (lambda: wav(channels=65535), "channels|cannot be read"),
    "a WAV of no bits": (lambda: wav(bits=0), "cannot be read"),
    "a long WAV": (
        lambda: wav(rate=1000, bits=8, data=bytes(601_000)),
        "601.00 seconds, more than the 600 .*max_audio_seconds",
    ),
    "a WAV of NaN": (not_a_number, "not finite"),
    "a WAV of infinity": (lambda: encoded(np.full(1000, np.inf), subtype="FLOAT"), "not finite"),
    "a FLAC's magic alone": (lambda: b"fLaC", "cannot be read as audio"),
    "a truncated FLAC": (lambda: cut(sound("FLAC")), "broken or truncated FLAC"),
    "a FLAC that does not say how long it is": (lambda: flac(0), "does not say how long"),
    "a FLAC that says it lasts for days": (
        lambda: flac(2**36 - 1),
        "1431655.77 seconds, more than the 600",
    ),
    "a FLAC that lasts for hours": (
        lambda: encoded(np.zeros(8000 * 7200, np.int16), "FLAC", 8000),
        "7200.00 seconds, more than the 600",
    ),
    "a FLAC of many channels at a fast rate": (
        lambda: flac(384_000 * 599, 384_000, 8),
        "8 channels together, more than are decoded",
    ),
    "a FLAC with more than it says": (lambda: flac(100), ""),
    "a FLAC with less than it says": (lambda: flac(100_000), "truncated FLAC"),
    "a broken FLAC": (
        lambda: sound("FLAC")[:2000] + bytes(3000) + sound("FLAC")[5000:],
        "broken or truncated FLAC",
    ),
    "an Ogg's magic alone": (lambda: b"OggS", "truncated Ogg"),
    "a truncated Ogg": (lambda: cut(sound("OGG")), "truncated Ogg"),
    "a truncated Opus": (lambda: cut(sound("OGG", subtype="OPUS")), "truncated Ogg"),
    "an Ogg less a byte": (lambda: sound("OGG")[:-1], "truncated Ogg"),
    "an Ogg that says it lasts for days": (lambda: ogg_of_other_length(2**40), ""),
    "an Ogg that says it ends before it begins": (lambda: ogg_of_other_length(-5), ""),
    "an Ogg of empty pages": (
        empty_pages,
        "no samples|cannot be read|broken|truncated|does not say",
    ),
    "an MP3's magic alone": (
        lambda: b"\xff\xfb\x90",
        "cannot be read as audio: it has no frames of an MP3",
    ),
    "an MP3 of other bytes": (
        lambda: b"\xff\xfb\x90\x64" + bytes(20_000_000),
        "cannot be read as audio|broken|no samples",
    ),
    "an MP3 of marks": (
        lambda: b"\xff\xfb" * 10_000_000,
        "cannot be read as audio|broken|no samples",
    ),
    "an MP3 of a million frames": (
        lambda: (b"\xff\xf3\x14\xc4" + bytes(20)) * 1_000_000,
        "seconds, more than the 600",
    ),
    "an MP3 that goes on as something else": (
        lambda: b"\xff\xfb\x90\x64" * 1_000_000,
        "cannot be read as audio|broken|no samples",
    ),
    "a truncated MP3": (lambda: cut(sound("MP3", 10.0)), "truncated MP3: .* of 160000 samples"),
    "a tag alone": (lambda: id3(100), "cannot be read as audio"),
    "a tag that is not there": (lambda: id3(2**28 - 1, sound("MP3")), "cannot be read as audio"),
    "a large tag": (lambda: id3(20 * 2**20, bytes(20 * 2**20) + sound("MP3")), ""),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name: str) -> None:
    make, message = BOMBS[name]
    data = make()
    start = cpu_seconds()
    if message:
        with (
            pytest.raises(RequestError, match=message) as caught,
            open_audio(data, LIMITS, label="audio 2") as audio,
        ):
            audio.read(16000)
        assert str(caught.value).startswith("audio 2: ")
        assert len(str(caught.value)) < 200
    else:
        with open_audio(data, LIMITS) as audio:
            assert audio.read(16000).ndim == 1
    assert cpu_seconds() - start < SECONDS


def peak() -> int:
    """KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def test_bombs_take_no_memory() -> None:
    lasting = {
        name: make()
        for name, (make, _) in BOMBS.items()
        if "says" in name or "lasts" in name or "fast" in name
    }
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    for data in lasting.values():
        with suppress(RequestError), open_audio(data, LIMITS) as audio:
            audio.read(16000)
    assert len(lasting) > 5
    assert peak() - before < 16 * 1024


def test_a_recording_is_not_decoded_to_learn_that_it_is_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        soundfile.SoundFile, "read", lambda *given, **named: pytest.fail("it was decoded")
    )
    limits = MediaLimits(max_audio_seconds=1.5)
    told = r"it has 2\.00 seconds, more than the 1\.5 that are taken \(max_audio_seconds\)"
    for format in ("WAV", "FLAC", "OGG", "MP3"):
        with pytest.raises(RequestError, match=told), open_audio(sound(format, 2.0), limits):
            pass


@pytest.mark.parametrize("format", ["WAV", "FLAC", "OGG", "MP3"])
def test_flipped_bytes_are_a_recording_or_a_request_error(format: str) -> None:
    rng = np.random.default_rng(1)
    data = sound(format, 0.3)
    for _ in range(200):
        broken = bytearray(data)
        for place in rng.integers(0, min(len(data), 400), 3):
            broken[place] = rng.integers(0, 256)
        try:
            with open_audio(bytes(broken), MediaLimits(max_audio_seconds=10)) as audio:
                assert np.isfinite(audio.read(16000)).all()
        except RequestError as error:
            assert str(error).startswith("audio: ")
