"""Movies and animations that tests make."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import av
import numpy as np
from PIL import Image


def pictures(count: int = 12, width: int = 48, height: int = 32) -> list[np.ndarray]:
    """A bar that grows, on a shade that changes."""
    found = []
    for number in range(count):
        pixels = np.full((height, width, 3), 10 * number, np.uint8)
        pixels[:, : 2 + 2 * number] = (240, 200 - 10 * number, 20)
        found.append(pixels)
    return found


def animation(
    kind: str = "GIF",
    frames: list[np.ndarray] | None = None,
    duration: int | list[int] = 250,
    **options: object,
) -> bytes:
    first, *rest = [Image.fromarray(one) for one in (pictures() if frames is None else frames)]
    file = io.BytesIO()
    if kind == "WEBP":
        options["lossless"] = True
    first.save(file, kind, save_all=True, append_images=rest, duration=duration, **options)
    return file.getvalue()


def still(kind: str) -> bytes:
    """A file of one picture."""
    file = io.BytesIO()
    Image.fromarray(pictures(1)[0]).save(file, kind)
    return file.getvalue()


def movie(
    format: str = "mp4",
    codec: str = "mpeg4",
    frames: list[np.ndarray] | None = None,
    rate: int = 4,
    **options: str,
) -> bytes:
    """`options`: of the container."""
    frames = pictures() if frames is None else frames
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "movie"
        with av.open(str(path), "w", format=format, options=options) as container:
            stream = container.add_stream(codec, rate=rate)
            stream.height, stream.width = frames[0].shape[:2]
            stream.pix_fmt = "yuv420p"
            for pixels in frames:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            container.mux(stream.encode())
        return path.read_bytes()


def decoded(data: bytes) -> list[np.ndarray]:
    """All frames of a movie."""
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
