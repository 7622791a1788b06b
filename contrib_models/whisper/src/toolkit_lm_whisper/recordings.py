"""Recordings that are transcribed, which may be long."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from toolkit_lm.errors import RequestError
from toolkit_lm_media.audio import open_audio
from toolkit_lm_media.limits import MediaLimits

LIMITS = MediaLimits(max_bytes=2**32, max_audio_seconds=24 * 3600)
"""A WAV has no more bytes. Those of an upload are bounded by the server, and what it becomes by the
cost of a request."""


def read_recording(path: Path, sampling_rate: int) -> np.ndarray:
    """Samples [N] float32 of a file, the mean of its channels, `sampling_rate` a second. Raises
    RequestError, naming the file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}.", "file") from None
    with open_audio(data, LIMITS, label=str(path), param="file") as audio:
        return audio.read(sampling_rate)
