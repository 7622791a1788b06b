"""Videos in memory: how many frames a file has and how fast they come, then those frames that are
asked for, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from toolkit_lm_media import gif, movie_formats, webp
from toolkit_lm_media.limits import MediaLimits
from toolkit_lm_media.refusal import RefusedError, named
from toolkit_lm_media.source import require_size
from toolkit_lm_media.video_contract import Video

__all__ = ["Video", "open_video"]


@contextmanager
def open_video(
    data: bytes, limits: MediaLimits, *, label: str = "video", param: str | None = None
) -> Iterator[Video]:
    """A GIF, a WEBP, an MP4, a MOV or a WEBM, within its bounds.

    `label` names the item in errors, such as "video 2", those of its frames too. Raises
    RequestError for another format, a broken file, no pixels, and more bytes, pixels of a frame,
    pixels of all frames, frames or seconds than `limits` has."""
    with named(label, param):
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
    raise RefusedError("it is not a video of a known format; known: GIF, MOV, MP4, WEBM, WEBP")
