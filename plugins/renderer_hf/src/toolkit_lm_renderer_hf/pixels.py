"""Pictures and frames in memory, as callers give them: images of Pillow, arrays of numpy or
torch."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image
from toolkit_lm.errors import RequestError
from toolkit_lm_media.modes import to_rgb
from toolkit_lm_media.refusal import RefusedError

_MOST_FPS = 1000.0


def read_pixels(source: Any, max_pixels: int) -> tuple[str, np.ndarray]:
    """The mode of a picture, and its pixels: uint8 [height, width, 3]. Raises RequestError."""
    image = _image_of_array(source) if isinstance(source, np.ndarray) else source
    if not isinstance(image, Image.Image):
        raise RequestError(
            "it must be a URL, bytes of a file, an image of Pillow or an array, not a "
            f"{type(source).__name__}."
        )
    width, height = image.size
    if not 0 < width * height <= max_pixels:
        raise RequestError(
            f"it has {width} x {height} pixels; from 1 to {max_pixels} are taken "
            "(max_media_pixels)."
        )
    try:
        # A copy: an array over Pillow's memory cannot be written to.
        return image.mode, np.array(to_rgb(image), dtype=np.uint8)
    except RefusedError as refused:
        raise RequestError(f"{refused}.") from None
    except Exception as error:  # whatever a decoder raises for a file that the caller has opened
        raise RequestError(f"its pixels cannot be read: {type(error).__name__}.") from error


class Frames:
    """The frames of a video: an array [n, height, width, 3], or a list of pictures of one size; or
    a pair of these and {"fps": ...}.

    Raises RequestError for anything else.
    """

    def __init__(self, source: Any, max_pixels: int) -> None:
        self._max_pixels = max_pixels
        frames, self.fps = _with_fps(source)
        if hasattr(frames, "detach"):
            # A tensor, without an import of torch.
            frames = frames.detach().cpu().numpy()
        if not (isinstance(frames, np.ndarray) and frames.ndim == 4) and not (
            isinstance(frames, list | tuple) and is_frames(frames)
        ):
            form = "its frames: an array uint8 [n, height, width, 3], or a list of images"
            raise RequestError(
                f"it must be a URL, bytes of a file, or {form}; not a {type(frames).__name__}."
            )
        self._frames: Any = frames
        self.num_frames = len(frames)
        if not self.num_frames:
            raise RequestError("it has no frames.")

    def digest(self) -> bytes:
        """Digest of the pixels, whatever form they were given in."""
        digest = hashlib.sha256()
        for pixels in self.frames(range(self.num_frames)):
            digest.update(repr(pixels.shape).encode())
            digest.update(pixels.data)
        return digest.digest()

    def frames(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Frames at `indices`: uint8 [height, width, 3]. Raises RequestError if a frame is not a
        picture or differs in size."""
        shape = None
        for index in indices:
            _, pixels = read_pixels(self._frames[index], self._max_pixels)
            if shape not in (None, pixels.shape):
                raise RequestError("its frames have two sizes.")
            shape = pixels.shape
            yield pixels


def repeated(frames: Iterable[np.ndarray], indices: Sequence[int]) -> Iterator[np.ndarray]:
    """Frames at ascending `indices`, of which `frames` has each once."""
    counts = Counter(indices)
    for pixels, index in zip(frames, counts, strict=True):
        for _ in range(counts[index]):
            yield pixels


def is_frames(source: Sequence[Any]) -> bool:
    """Whether a list is one video's frames, and no list of videos."""
    return bool(source) and all(
        isinstance(image, Image.Image) or getattr(image, "ndim", 0) == 3 for image in source
    )


def is_with_fps(source: Any) -> bool:
    """Whether it is frames, and how fast they come."""
    return isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Mapping)


def _with_fps(source: Any) -> tuple[Any, float | None]:
    if not is_with_fps(source):
        return source, None
    frames, metadata = source
    fps = metadata.get("fps")
    if set(metadata) - {"fps"}:
        raise RequestError(
            f"its frames come with {sorted(map(str, metadata))}; only 'fps' may be said."
        )
    if fps is None:
        return frames, None
    return frames, checked_fps(fps)


def checked_fps(fps: Any) -> float:
    """Raises RequestError unless it is a number of frames in a second."""
    if (
        isinstance(fps, bool)
        or not isinstance(fps, int | float)
        or not math.isfinite(fps)
        or not 0 < fps <= _MOST_FPS
    ):
        raise RequestError(
            f"fps must be a number above 0, and at most {_MOST_FPS:g}, not {fps!r:.50}."
        )
    return float(fps)


def _image_of_array(array: np.ndarray) -> Image.Image:
    if array.dtype != np.uint8 or array.ndim not in (2, 3):
        raise RequestError(
            f"an array must be uint8 [height, width, 3], not {array.dtype} {list(array.shape)}."
        )
    if array.ndim == 3 and array.shape[2] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = np.moveaxis(array, 0, -1)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if not array.size or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise RequestError(
            f"an array must be uint8 [height, width, 3], not of the shape {list(array.shape)}."
        )
    return Image.fromarray(np.ascontiguousarray(array))
