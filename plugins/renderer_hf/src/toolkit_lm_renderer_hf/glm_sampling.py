"""Sampling of a video's frames, as transformers' processors of GLM-4.1V and GLM-4.6V do it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from toolkit_lm.errors import RequestError

from toolkit_lm_renderer_hf.sampling import UNKNOWN_FPS, Sampling, unknown_rate

_MOST = 2**20
"""Frames, more than any video has."""
_RATES = ((30, 3.0), (300, 1.0), (math.inf, 0.5))
"""Patches of a second in videos of at most so many seconds, GLM-4.6V's."""
_MOST_SECONDS = 2400
_MOST_FRAMES = 640
"""Bounds of GLM-4.6V."""


@dataclass(frozen=True)
class SecondSampling(Sampling):
    """Sampling of GLM-4.1V: so many frames of each second, in pairs."""

    max_duration: int = 300
    """Seconds. A longer video has as many frames as this one."""

    def indices(
        self, total: int, fps: float | None, options: Mapping[str, Any], *, is_file: bool
    ) -> list[int]:
        if not options.get("do_sample_frames", is_file or self.of_frames or bool(options)):
            return list(range(total))
        if fps is None:
            raise unknown_rate("do_sample_frames: false")
        seconds = total / fps if is_file else round((total - 1) / fps) + 1
        found = dict.fromkeys(self._samples(total, fps, seconds, options) or [0])
        taken = list(found)
        # Frames come in pairs.
        return taken + taken[-1:] * (len(taken) % 2)

    def _samples(
        self, total: int, fps: float, seconds: float, options: Mapping[str, Any]
    ) -> Iterable[int]:
        """Indices of frames, some of them more than once."""
        rate = options.get("fps") or self.fps or 2
        is_short = seconds <= self.max_duration
        count = max(int((seconds if is_short else self.max_duration) * rate), 1)
        if count > _MOST:
            raise RequestError(
                f"an fps of {rate} takes {count} frames of {seconds:.0f} seconds; at most {_MOST} "
                "can be taken."
            )
        if is_short:
            return [min(total - 1, math.ceil(i * fps / rate)) for i in range(count)]
        if count >= total:
            return range(total)
        times = np.linspace(0, seconds, count)
        return [min(total - 1, math.ceil(time * fps)) for time in times.tolist()]

    def times(self, indices: Sequence[int], fps: float | None) -> np.ndarray:
        """Seconds [patches]: those of every second frame."""
        rate = UNKNOWN_FPS if fps is None else fps
        count = -(-len(indices) // self.temporal_patch_size)
        found = [index / rate for index in indices[::2]][:count]
        return np.array(found + found[-1:] * (count - len(found)))


class LengthSampling(SecondSampling):
    """Sampling of GLM-4.6V: the length of a video says how many frames of a second are taken."""

    def _samples(
        self, total: int, fps: float, seconds: float, options: Mapping[str, Any]
    ) -> Iterable[int]:
        depth = self.temporal_patch_size
        length = min(seconds, _MOST_SECONDS)
        rate = next(rate for most, rate in _RATES if length <= most)
        count = min(int(length * rate * depth), _MOST_FRAMES)
        if total < count:
            return _even(0, total - 1, count)
        step = 1 / (depth * rate)
        found: list[int] = []
        wanted = 0.0
        for index in range(total):
            # Transformers computes a product of floats, not a quotient.
            if index * (1 / fps) < wanted:
                continue
            wanted += step
            found.append(index)
            if wanted >= int(seconds):
                break
        if len(found) < count:
            return _even(found[0], found[-1], count)
        return found if len(found) == count else _even(0, total - 1, count)


def _even(first: int, last: int, count: int) -> list[int]:
    found: list[int] = np.linspace(first, last, count, dtype=int).tolist()
    return found
