"""Recordings, written by libsndfile."""

from __future__ import annotations

import io

import numpy as np
import soundfile


def tone(seconds: float = 1.0, rate: int = 16000, hertz: float = 440.0, channels: int = 1) -> np.ndarray:
    """Samples [N, channels]."""
    samples = 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)
    return np.repeat(samples[:, None], channels, axis=1)


def sound(format: str = "WAV", seconds: float = 1.0, rate: int = 16000, channels: int = 1, **options: str) -> bytes:
    """A file."""
    return encoded(tone(seconds, rate, channels=channels), format, rate, **options)


def encoded(samples: np.ndarray, format: str = "WAV", rate: int = 16000, **options: str) -> bytes:
    """`samples` [N] or [N, channels], in a file."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=format, **options)
    return file.getvalue()
