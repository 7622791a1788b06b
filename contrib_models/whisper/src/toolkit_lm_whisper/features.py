"""Log-mel features of speech, as Whisper has learned from (Radford et al. 2022). Needs numpy
alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class LogMel:
    """Samples of a window -> features [num_mels, frames] float32. What is shorter than the window
    is filled up with silence."""

    num_mels: int = 80
    sampling_rate: int = 16000
    """Samples a second."""
    seconds: int = 30
    """Length of a window in seconds."""
    fft_size: int = 400
    hop: int = 160
    """Samples from frame to frame."""

    @classmethod
    def read(cls, folder: Path, num_mels: int) -> LogMel:
        """Reads preprocessor_config.json, if there is one. `num_mels`: the model's."""
        path = folder / "preprocessor_config.json"
        stated = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        names = {
            "sampling_rate": "sampling_rate",
            "seconds": "chunk_length",
            "fft_size": "n_fft",
            "hop": "hop_length",
        }
        return cls(
            num_mels,
            **{
                name: stated[key] for name, key in names.items() if isinstance(stated.get(key), int)
            },
        )

    @property
    def num_samples(self) -> int:
        """Samples of a window."""
        return self.seconds * self.sampling_rate

    @property
    def num_frames(self) -> int:
        """Frames of a window's features."""
        return self.num_samples // self.hop

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """`samples` [N] float32, at most a window's."""
        padded = np.zeros(self.num_samples, np.float32)
        padded[: len(samples)] = samples
        return self.of_recording(padded)

    def of_recording(self, samples: np.ndarray) -> np.ndarray:
        """Features [num_mels, N // hop] float32 of a recording of any length. Loudness is relative
        to its loudest part."""
        around = np.pad(
            samples,
            self.fft_size // 2,
            mode="reflect" if len(samples) > self.fft_size // 2 else "constant",
        )
        frames = np.lib.stride_tricks.sliding_window_view(around, self.fft_size)[:: self.hop][
            : len(samples) // self.hop
        ]
        mel = np.empty((self.num_mels, len(frames)), np.float32)
        for start in range(0, len(frames), self.num_frames):
            part = frames[start : start + self.num_frames]
            power = np.abs(np.fft.rfft(part * self._window)) ** 2
            mel[:, start : start + len(part)] = np.log10(
                np.maximum(self._filters.T @ power.T, 1e-10)
            )
        floor = mel.max(initial=-10.0) - np.float32(8.0)
        np.maximum(mel, floor, out=mel)
        mel += np.float32(4.0)
        mel /= np.float32(4.0)
        return mel

    @cached_property
    def _window(self) -> np.ndarray:
        """Hann's, periodic."""
        return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self.fft_size) / self.fft_size)

    @cached_property
    def _filters(self) -> np.ndarray:
        """[frequencies, num_mels]: triangles of equal area, on Slaney's scale."""
        top = self.sampling_rate / 2
        frequencies = np.linspace(0, top, self.fft_size // 2 + 1)
        edges = _from_mel(np.linspace(_to_mel(0.0), _to_mel(top), self.num_mels + 2))
        slopes = edges - frequencies[:, None]
        down = -slopes[:, :-2] / np.diff(edges)[:-1]
        up = slopes[:, 2:] / np.diff(edges)[1:]
        filters: np.ndarray = np.maximum(0, np.minimum(down, up)) * (2 / (edges[2:] - edges[:-2]))
        return filters


def _to_mel(hertz: float) -> float:
    """Linear up to 1000 Hz, logarithmic above."""
    return 3 * hertz / 200 if hertz < 1000 else 15 + 27 * float(np.log(hertz / 1000) / np.log(6.4))


def _from_mel(mels: np.ndarray) -> np.ndarray:
    return np.where(mels < 15, 200 * mels / 3, 1000 * np.exp((mels - 15) * np.log(6.4) / 27))
