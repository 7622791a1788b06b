"""Videos in memory: how many frames a file has and how fast they come, then those frames that are
asked for, one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import numpy as np
import numpy.typing as npt

from toolkit_lm_media import gif, movie_formats, webp
from toolkit_lm_media.limits import MediaLimits
from toolkit_lm_media.refusal import RefusedError, named
from toolkit_lm_media.source import require_size


class Video(ABC):
    """Frames that are read in order. Only one of them is in memory."""

    def __init__(self, num_frames: int, fps: float) -> None:
        self.num_frames = num_frames
        self.fps = fps
        """Frames in a second, on average."""

    @abstractmethod
    def frames(self, indices: Sequence[int]) -> Iterator[npt.NDArray[np.uint8]]:
        """Those at `indices`, which ascend: uint8 [height, width, 3], RGB, all of one size. Raises
        RefusedError where one is broken."""

    def close(self) -> None:  # noqa: B027 # most hold nothing
        """Frees what the decoder holds."""


@contextmanager
def open_video(
    data: bytes, limits: MediaLimits, *, what: str = "video", param: str | None = None
) -> Iterator[Video]:
    """A GIF, a WEBP, an MP4, a MOV or a WEBM, within its bounds.

    `what` names the item in errors, such as "video 2", those of its frames too. Raises RequestError
    for another format, a broken file, no pixels, and more bytes, pixels of a frame, pixels of all
    frames, frames or seconds than `limits` has.
    """
    with named(what, param):
        require_size(data, limits)
        with closing(_open(data, limits)) as video:
            yield video


def _open(data: bytes, limits: MediaLimits) -> Video:
    if data.startswith(gif.MAGICS) or webp.is_webp(data):
        # Here, because most videos are no animations, and most animations no videos.
        from toolkit_lm_media.animation import Animation

        return Animation(
            gif.read_animation(data) if data.startswith(gif.MAGICS) else webp.read_animation(data),
            limits,
        )
    if (format := movie_formats.format_of(data)) is not None:
        from toolkit_lm_media.movie import Movie

        return Movie(data, format, limits)
    raise RefusedError("it is no video of a known format; known: GIF, MOV, MP4, WEBM, WEBP")


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
