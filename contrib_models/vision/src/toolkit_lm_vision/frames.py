"""Frames of a video that stand apart in a prompt: their times, and tokens of the texts among them.
Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from toolkit_lm.errors import RequestError

if TYPE_CHECKING:
    import numpy as np

TIMES = "timestamps"
"""Name of the array of seconds, one number of each frame that is told its time."""
TIME_IDS = "timestamp_ids"
"""Name of the array [texts, longest] of tokens of these times."""
_MOST_FRAMES = 2**16
_MOST_SECONDS = 2**24


def frame_seconds(data: Mapping[str, np.ndarray]) -> list[float]:
    """Times of a video's frames. Raises RequestError."""
    times = data.get(TIMES)
    if (
        times is None
        or times.ndim != 1
        or times.dtype.kind not in "iuf"
        or not 0 < len(times) <= _MOST_FRAMES
        or not all(0 <= time < _MOST_SECONDS for time in times.tolist())
    ):
        raise RequestError(
            f"one video must have {TIMES}: the seconds [n] of its frames, from 0 to "
            f"{_MOST_SECONDS}."
        )
    return list(map(float, times.tolist()))


def frame_texts(
    data: Mapping[str, np.ndarray],
    count: int,
    num_frames: int,
    special: Collection[int | None],
    vocab_size: int | None,
) -> list[list[int]]:
    """Tokens of `count` texts of times. Raises RequestError for another number of them, and for a
    token that is `special` or unknown."""
    array = data.get(TIME_IDS)
    if array is None or array.ndim != 2 or len(array) != count or array.dtype.kind not in "iu":
        raise RequestError(f"one video of {num_frames} frames must have as many {TIMES}.")
    rows = [[token for token in row if token >= 0] for row in array.tolist()]
    if any(
        token in special or (vocab_size and token >= vocab_size) for row in rows for token in row
    ):
        raise RequestError(f"{TIME_IDS} must be tokens of text.")
    return rows
