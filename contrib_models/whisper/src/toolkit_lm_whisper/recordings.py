"""Recordings in files, decoded by libsndfile (WAV, FLAC, Ogg, MP3, ...) and resampled by soxr, a block at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from toolkit_lm.errors import RequestError

_BLOCK = 2**16
"""Frames that are decoded at a time."""
_MOST_CHANNELS = 8
_RATES = (1_000, 384_000)
BYTES_PER_SAMPLE = 12
"""Of memory, while features are computed: its own and its copies'."""
_MOST_SECONDS = 24 * 3600


class Audio:
    """An open file, of which the header is read."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name
        rate, channels = file.samplerate, file.channels
        if not _RATES[0] <= rate <= _RATES[1]:
            raise RequestError(f"{name} states {rate} samples a second: {_RATES[0]:,} to {_RATES[1]:,} are read.", "file")
        if not 0 < channels <= _MOST_CHANNELS:
            raise RequestError(f"{name} has {channels} channels: up to {_MOST_CHANNELS} are read.", "file")
        if file.frames <= 0:
            raise RequestError(f"{name} is empty: it needs at least one sample.", "file")

    @property
    def seconds(self) -> float:
        """As the header has it."""
        seconds: float = self._file.frames / self._file.samplerate
        return seconds

    def read(self, sampling_rate: int) -> np.ndarray:
        """Samples [N] float32, the mean of the channels, `sampling_rate` a second. Raises RequestError."""
        import soundfile
        import soxr

        stream = soxr.ResampleStream(self._file.samplerate, sampling_rate, 1, dtype="float32")
        is_same, parts, left = self._file.samplerate == sampling_rate, [], self._file.frames
        try:
            while left > 0:
                block = self._file.read(min(_BLOCK, left), dtype="float32", always_2d=True)
                left -= len(block) if len(block) else left
                mono = np.ascontiguousarray(block.mean(axis=1, dtype=np.float32))
                parts.append(mono if is_same else stream.resample_chunk(mono, last=left <= 0))
        except soundfile.LibsndfileError as error:
            raise RequestError(f"{self._name} is damaged: {error.error_string}", "file") from None
        samples: np.ndarray = np.concatenate(parts)
        if not len(samples):
            raise RequestError(f"{self._name} is empty: it needs at least one sample.", "file")
        return samples


@contextmanager
def open_audio(file: Path | IO[bytes], name: str) -> Iterator[Audio]:
    """Reads the header. `name`: for errors. Raises RequestError."""
    import soundfile

    with ExitStack() as stack:
        try:
            opened = stack.enter_context(file.open("rb")) if isinstance(file, Path) else file
        except OSError as error:
            raise RequestError(f"{name} cannot be read: {error.strerror}.", "file") from None
        try:
            sound = stack.enter_context(soundfile.SoundFile(opened))
        except soundfile.LibsndfileError as error:
            told = error.error_string.strip().rstrip(".")
            raise RequestError(f"{name} cannot be read as audio: {told}. WAV, FLAC, Ogg and MP3 are read.", "file") from None
        yield Audio(sound, name)


def read_recording(path: Path, sampling_rate: int) -> np.ndarray:
    """Samples [N] float32 of a file, the mean of its channels, `sampling_rate` a second. Raises RequestError, naming the file."""
    with open_audio(path, str(path)) as audio:
        if audio.seconds > _MOST_SECONDS:
            raise RequestError(f"{path} has {audio.seconds / 3600:.1f} hours: no more than {_MOST_SECONDS // 3600} are read.", "file")
        return audio.read(sampling_rate)
