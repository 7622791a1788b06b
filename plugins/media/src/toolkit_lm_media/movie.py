"""Movies, decoded by FFmpeg in a process of their own, whose memory and time are bounded."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit_lm_media import movie_formats
from toolkit_lm_media.limits import MediaLimits
from toolkit_lm_media.refusal import RefusedError
from toolkit_lm_media.video import Video, require_bounds

_PROGRAM = Path(__file__).with_name("movie_decoder.py")
_SECONDS = 60
"""Of processor time."""
_MEMORY, _BYTES_PER_PIXEL = 2**29, 32
"""Of the process: for itself, and for each pixel of a frame, of which a decoder keeps up to 16 and this one makes another."""
_SHARED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
"""Of this process's environment."""


class Movie(Video):
    """An MP4, a MOV or a WEBM. A decoder that fails, or wants more than it may have, ends alone."""

    def __init__(self, data: bytes, format: str, limits: MediaLimits) -> None:
        """Raises RefusedError for one that is broken or beyond the limits."""
        if importlib.util.find_spec("av") is None:
            raise RefusedError("movies are not read here: that needs pip install 'toolkit-lm-media[video]'; GIF and WEBP are read")
        movie_formats.require_whole(data, format)
        # -P: this folder's modules are not the child's.
        self._process = subprocess.Popen(  # nosec B603 # our own program
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _SHARED if name in os.environ},
        )
        try:
            found = self._ask(
                {
                    "format": format,
                    "size": len(data),
                    "max_pixels": limits.max_pixels,
                    "most_decoded": limits.most_decoded("movie"),
                    "memory": _MEMORY + _BYTES_PER_PIXEL * limits.max_pixels,
                    "seconds": _SECONDS,
                },
                data,
            )
            super().__init__(int(found["num_frames"]), float(found["fps"]))
            require_bounds("movie", found["width"], found["height"], self.num_frames, self.fps, limits)
        except BaseException:
            self.close()
            raise

    def frames(self, indices: Sequence[int]) -> Iterator[npt.NDArray[np.uint8]]:
        answer = self._ask({"indices": list(indices)})
        for _ in indices:
            height, width = answer["height"], answer["width"]
            pixels = np.frombuffer(self._read(height * width * 3), np.uint8).reshape(height, width, 3)
            yield np.rot90(pixels, answer["turns"]).copy()
            answer = self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, question: dict[str, Any], data: bytes = b"") -> dict[str, Any]:
        assert self._process.stdin is not None, "it is a pipe"
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n" + data)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # Its last words are read below.
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "it is a pipe"
        answer: dict[str, Any] = json.loads(self._process.stdout.readline() or b'{"refused": "it cannot be decoded within bounds"}')
        if "refused" in answer:
            raise RefusedError(answer["refused"])
        return answer

    def _read(self, count: int) -> bytes:
        assert self._process.stdout is not None, "it is a pipe"
        data = self._process.stdout.read(count)
        if len(data) < count:
            raise RefusedError("it cannot be decoded within bounds")
        return data
