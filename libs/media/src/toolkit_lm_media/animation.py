"""Animated pictures as videos, decoded by Pillow."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.WebPImagePlugin import WebPImageFile

from toolkit_lm_media.header import AnimationHeader
from toolkit_lm_media.limits import MediaLimits
from toolkit_lm_media.modes import to_rgb
from toolkit_lm_media.refusal import RefusedError
from toolkit_lm_media.video_contract import Video, require_bounds

_DECODERS: dict[str, Callable[[io.BytesIO], ImageFile]] = {
    "GIF": GifImageFile,
    "WEBP": WebPImageFile,
}
_SHORTEST = 10
_USUAL = 100
"""Milliseconds. A frame that is shown no longer than the one is shown for the other, as browsers
do."""


class Animation(Video):
    """A GIF or a WEBP."""

    def __init__(self, header: AnimationHeader, limits: MediaLimits) -> None:
        """Raises RefusedError for one beyond the limits."""
        shown = sum(_USUAL if duration <= _SHORTEST else duration for duration in header.durations)
        super().__init__(len(header.durations), 1000 * len(header.durations) / shown)
        require_bounds("animation", header.width, header.height, self.num_frames, self.fps, limits)
        self._header = header

    def frames(self, indices: Sequence[int]) -> Iterator[npt.NDArray[np.uint8]]:
        header = self._header
        broken = RefusedError(f"it is a broken or truncated {header.format}")
        try:
            image = _DECODERS[header.format](io.BytesIO(header.body))
        except Exception:  # as in image.py: decoders raise nearly anything
            raise broken from None
        with image:
            for index in indices:
                try:
                    # Frames between are decoded too: each is painted over those before it.
                    image.seek(index)
                    pixels = np.array(to_rgb(image), dtype=np.uint8)
                except MemoryError:
                    raise RefusedError("it does not fit in memory") from None
                except Exception:
                    raise broken from None
                if pixels.shape != (header.height, header.width, 3):
                    raise RefusedError(f"it is a {header.format} with two sizes")
                yield pixels
