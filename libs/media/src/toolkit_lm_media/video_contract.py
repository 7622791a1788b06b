"""Contract of all kinds of video: frames are read in order and within bounds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from toolkit_lm_media.limits import MediaLimits
from toolkit_lm_media.refusal import RefusedError


class Video(ABC):
    """Frames that are read in order. Only one of them is in memory."""

    def __init__(self, num_frames: int, fps: float) -> None:
        self.num_frames = num_frames
        self.fps = fps
        """Frames in a second, on average."""

    @abstractmethod
    def frames(self, indices: Sequence[int]) -> Iterator[npt.NDArray[np.uint8]]:
        """Frames at `indices`, which ascend: uint8 [height, width, 3], RGB, all of one size. Raises
        RefusedError if one is broken."""

    def close(self) -> None:  # noqa: B027 # most hold nothing
        """Frees what the decoder holds."""


def require_bounds(
    kind: str, width: int, height: int, num_frames: int, fps: float, limits: MediaLimits
) -> None:
    """Raises RefusedError for no pixels or frames, and for too many."""
    if width < 1 or height < 1 or num_frames < 1:
        raise RefusedError("it has no pixels")
    if width * height > limits.max_pixels:
        raise RefusedError(
            f"it has {width} x {height} pixels, more than the {limits.max_pixels} that are taken"
        )
    if width * height * num_frames > limits.most_decoded(kind):
        counted = f"it has {num_frames} frames of {width} x {height} pixels"
        raise RefusedError(
            f"{counted}, more than the {limits.most_decoded(kind)} pixels that are decoded"
        )
    if not 0 < fps < float("inf"):
        raise RefusedError("it does not say how fast its frames come")
    if num_frames / fps > limits.max_seconds:
        raise RefusedError(
            f"it has {num_frames / fps:.0f} seconds, more than the {limits.max_seconds:g} that "
            "are taken"
        )
