"""Files of recordings: WAV by Python itself."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
from toolkit_lm.errors import RequestError

_MOST_SECONDS = 24 * 3600


def read_wav(path: Path) -> tuple[np.ndarray, int]:
    """Samples [N] float32 between -1 and 1, the mean of the channels; and samples a second. Raises RequestError, naming the file."""
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, rate, count = file.getnchannels(), file.getsampwidth(), file.getframerate(), file.getnframes()
            if count > _MOST_SECONDS * max(rate, 1):
                raise RequestError(f"{path}: no more than {_MOST_SECONDS // 3600} hours are read.", "file")
            data = file.readframes(count)
    except (OSError, EOFError, wave.Error) as error:
        how = f"ffmpeg -i {path.name} -ar 16000 -ac 1 out.wav"
        raise RequestError(f"{path} cannot be read as WAV: {error}. Other formats: `{how}`.", "file") from None
    samples: np.ndarray
    if width == 1:
        samples = (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    elif width in (2, 4):
        samples = np.frombuffer(data, f"<i{width}").astype(np.float32) / np.float32(2 ** (8 * width - 1))
    else:
        raise RequestError(f"{path} has samples of {8 * width} bits: 8, 16 and 32 are read.", "file")
    return samples.reshape(-1, channels).mean(axis=1, dtype=np.float32), rate
