"""Movies, decoded by FFmpeg in a process of their own, whose memory and time are bounded."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from toolkit_lm_media import movie_formats
from toolkit_lm_media.decoder import Decoder
from toolkit_lm_media.limits import MediaLimits
from toolkit_lm_media.refusal import RefusedError
from toolkit_lm_media.video_contract import Video, require_bounds

_MEMORY = 2**29
_BYTES_PER_PIXEL = 32
"""Memory of the process: a fixed part, and bytes for each pixel of a frame. A decoder keeps up to
16 frames and this process makes another."""


class Movie(Video):
    """An MP4, a MOV or a WEBM. A decoder that fails, or wants more than it may have, ends alone."""

    def __init__(self, data: bytes, format: str, limits: MediaLimits) -> None:
        """Raises RefusedError for one that is broken or beyond the limits."""
        if importlib.util.find_spec("av") is None:
            raise RefusedError(
                "movies are not read here: that needs pip install 'toolkit-lm-media[video]'; GIF "
                "and WEBP are read"
            )
        movie_formats.require_whole(data, format)
        order = {
            "format": format,
            "max_pixels": limits.max_pixels,
            "most_decoded": limits.most_decoded("movie"),
            "memory": _MEMORY + _BYTES_PER_PIXEL * limits.max_pixels,
        }
        self._decoder = Decoder()
        try:
            found = self._decoder.ask({"size": len(data), **order}, data)
            super().__init__(int(found["num_frames"]), float(found["fps"]))
            require_bounds(
                "movie", found["width"], found["height"], self.num_frames, self.fps, limits
            )
        except BaseException:
            self.close()
            raise

    def frames(self, indices: Sequence[int]) -> Iterator[npt.NDArray[np.uint8]]:
        answer = self._decoder.ask({"indices": list(indices)})
        for _ in indices:
            height = answer["height"]
            width = answer["width"]
            pixels = np.frombuffer(self._decoder.read(height * width * 3), np.uint8).reshape(
                height, width, 3
            )
            yield np.rot90(pixels, answer["turns"]).copy()
            answer = self._decoder.answer()

    def close(self) -> None:
        self._decoder.close()
