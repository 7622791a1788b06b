"""Recordings in memory: what the header of a file says, then its samples, decoded by libsndfile or
FFmpeg and resampled by soxr."""

from __future__ import annotations

import importlib.util
import io
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit_lm_media import mp3, sound_formats
from toolkit_lm_media.decoder import Decoder
from toolkit_lm_media.limits import MediaLimits
from toolkit_lm_media.refusal import RefusedError, named
from toolkit_lm_media.sniff import modality_of
from toolkit_lm_media.source import require_size

BYTES_PER_SAMPLE = 12
"""Bytes of memory per sample while features are computed, copies included."""
RATES = (1_000, 384_000)
"""The fewest and the most samples a second that are read."""
_BLOCK = 2**16
"""Frames that are decoded at a time."""
_MOST_CHANNELS = 8
_MOST_DECODED = 192_000
"""Samples of all channels, for each second that is taken: as many as 48,000 a second of four
channels."""
KNOWN = ("AAC", "FLAC", "M4A", "MP3", "MP4", "Ogg", "WAV", "WEBM")
"""Formats, as errors name them."""
_MEMORY = 2**29
"""Bytes of memory of the process that runs FFmpeg."""
_MOST_TOLD = 100
"""Characters of libsndfile's own words."""


class Audio(ABC):
    """An open file, of which the header is read. Its methods raise RefusedError."""

    def __init__(
        self, format: str, rate: int, channels: int, seconds: float, limits: MediaLimits
    ) -> None:
        """`format`: "WAV" or the like. `rate`: samples a second. `seconds`: as the file says."""
        self.format = format
        self.rate = rate
        self.seconds = seconds
        if not RATES[0] <= rate <= RATES[1]:
            raise RefusedError(
                f"it states {rate} samples a second; {RATES[0]:,} to {RATES[1]:,} are read"
            )
        if not 0 < channels <= _MOST_CHANNELS:
            raise RefusedError(f"it has {channels} channels; up to {_MOST_CHANNELS} are read")
        if seconds <= 0:
            raise RefusedError("it has no samples")
        if seconds * rate >= 2**62:
            raise RefusedError("its header does not say how long it is")
        most = limits.max_audio_seconds
        if seconds > most:
            raise RefusedError(
                f"it has {seconds:.2f} seconds, more than the {most:g} that are taken "
                "(max_audio_seconds)"
            )
        if seconds * rate * channels > most * _MOST_DECODED:
            counted = (
                f"it has {round(seconds * rate) * channels} samples, {channels} channels together"
            )
            raise RefusedError(
                f"{counted}, more than are decoded for {most:g} seconds (max_audio_seconds)"
            )

    @abstractmethod
    def _parts(self) -> Iterator[npt.NDArray[np.float32]]:
        """Samples [n], the mean of the channels, in order. Raises RefusedError where the file is
        damaged or cut short."""

    def read(self, sampling_rate: int) -> npt.NDArray[np.float32]:
        """Samples [N], the mean of the channels, `sampling_rate` a second. Raises RefusedError
        where it is damaged or cut short."""
        stream = Resampler(self.rate, sampling_rate)
        for part in self._parts():
            stream.push(part)
        samples = stream.finish()
        if not len(samples):
            raise RefusedError("it has no samples")
        if not np.isfinite(samples).all():
            raise RefusedError("its samples are not finite numbers")
        return samples


class _OfLibsndfile(Audio):
    def __init__(self, file: Any, format: str, limits: MediaLimits, stated: int | None) -> None:
        """`file`: of soundfile. `format`: "WAV" or the like. `stated`: frames that there must be;
        None: as many as there are."""
        self._file = file
        self._stated = stated
        super().__init__(
            format, file.samplerate, file.channels, file.frames / max(file.samplerate, 1), limits
        )

    def _parts(self) -> Iterator[npt.NDArray[np.float32]]:
        import soundfile

        count = 0
        try:
            while len(block := self._file.read(_BLOCK, dtype="float32", always_2d=True)):
                count += len(block)
                yield block.mean(axis=1, dtype=np.float32)
        except soundfile.LibsndfileError:
            raise RefusedError(f"it is a broken or truncated {self.format}") from None
        if self._stated is not None and count < self._stated:
            raise RefusedError(
                f"it is a truncated {self.format}: {count} of {self._file.frames} samples are there"
            )


class _OfFFmpeg(Audio):
    def __init__(self, data: bytes, container: str, limits: MediaLimits) -> None:
        sound_formats.require_whole_container(data, container)
        self._decoder = Decoder()
        try:
            order = {
                "format": container,
                "size": len(data),
                "memory": _MEMORY,
                "most_seconds": limits.max_audio_seconds,
            }
            found = self._decoder.ask(order, data)
            super().__init__(
                sound_formats.CONTAINERS[container],
                found["rate"],
                found["channels"],
                found["seconds"],
                limits,
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the decoder's process."""
        self._decoder.close()

    def _parts(self) -> Iterator[npt.NDArray[np.float32]]:
        answer = self._decoder.ask({})
        while "samples" in answer:
            yield np.frombuffer(self._decoder.read(4 * answer["samples"]), np.float32)
            answer = self._decoder.answer()


class Resampler:
    """Samples of one rate -> samples of another."""

    def __init__(self, source_rate: int, wanted: int) -> None:
        """`source_rate`, `wanted`: samples a second."""
        import soxr

        self._stream = (
            None
            if source_rate == wanted
            else soxr.ResampleStream(source_rate, wanted, 1, dtype="float32")
        )
        self._parts: list[npt.NDArray[np.float32]] = []

    def push(self, samples: npt.NDArray[np.float32]) -> None:
        """The next ones, [N]."""
        samples = np.ascontiguousarray(samples)
        self._parts.append(
            samples if self._stream is None else self._stream.resample_chunk(samples)
        )

    def finish(self) -> npt.NDArray[np.float32]:
        """All of them, [M]."""
        if self._stream is not None:
            self._parts.append(self._stream.resample_chunk(np.zeros(0, np.float32), last=True))
        return np.concatenate(self._parts) if self._parts else np.zeros(0, np.float32)


@contextmanager
def open_audio(
    data: bytes, limits: MediaLimits, *, label: str = "audio", param: str | None = None
) -> Iterator[Audio]:
    """A WAV, FLAC, Ogg, MP3, AAC, or the sound of an MP4, M4A, MOV or WEBM, within its bounds. Only
    its header is read.

    `label` names the item in errors, such as "audio 2", those of its samples too. Raises
    RequestError for another format, a broken file, no samples, and more bytes, seconds or channels
    than are taken.
    """
    with named(label, param):
        require_size(data, limits)
        _require_sound(data)
        if (container := sound_formats.container_of(data)) is not None:
            with closing(_OfFFmpeg(data, container, limits)) as audio:
                yield audio
            return
        import soundfile

        format = sound_formats.format_of(data)
        stated = sound_formats.require_whole(data)
        stated_in_file = format == "MP3" and mp3.states_length(data)
        if format == "MP3" and not stated_in_file:
            data = mp3.with_length(data, limits.max_audio_seconds)
        try:
            file = soundfile.SoundFile(io.BytesIO(data))
        except soundfile.LibsndfileError as error:
            problem = (
                "".join(character for character in error.error_string if character.isprintable())
                .strip()
                .rstrip(".")[:_MOST_TOLD]
            )
            # libsndfile says about an MP3 that the file may be a pipe.
            problem = "it has no frames of an MP3" if format == "MP3" else problem
            raise RefusedError(f"it cannot be read as audio: {problem}") from None
        with file:
            if stated_in_file:
                stated = file.frames - sound_formats.MP3_SLACK
            yield _OfLibsndfile(file, format, limits, stated)


def _require_sound(data: bytes) -> None:
    if importlib.util.find_spec("soundfile") is None or importlib.util.find_spec("soxr") is None:
        raise RefusedError(
            "recordings are not read here: that needs pip install 'toolkit-lm-media[audio]'"
        )
    container = sound_formats.container_of(data)
    if container is not None and importlib.util.find_spec("av") is None:
        name = sound_formats.CONTAINERS[container]
        raise RefusedError(
            f"recordings in a file of the kind {name} are not read here: that needs pip install "
            "'toolkit-lm-media[video]'"
        )
    modality = modality_of(data)
    if modality != "audio" and container is None:
        reason = (
            "it is not a recording of a known format"
            if modality is None
            else f"it is {_ARTICLES[modality]}, and no recording"
        )
        raise RefusedError(f"{reason}; known: {', '.join(KNOWN)}")


_ARTICLES = {"image": "an image", "video": "a video"}
