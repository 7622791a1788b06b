"""Sampling of a video's frames, as transformers' video processors of Qwen2-VL, Qwen3-VL, InternVL
and SmolVLM do it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from toolkit_lm.errors import RequestError

from toolkit_lm_renderer_hf.image_processor import refusal
from toolkit_lm_renderer_hf.pixels import checked_fps

OPTIONS = ("fps", "num_frames", "do_sample_frames")
"""Video sampling options that a request may set."""
_FPS = 2.0
"""Frames in a second that are taken of a file, where the checkpoint says of none: as Qwen's own
programs do. Transformers takes all."""
_MOST_EDGE_FRAMES = 64
"""Frames of a video of SmolVLM, where the checkpoint says of none: those of all published ones."""
UNKNOWN_FPS = 24.0
"""Frames per second assumed for frames given without a rate, the same as in transformers."""


@dataclass(frozen=True)
class Sampling:
    """A checkpoint's."""

    temporal_patch_size: int
    min_frames: int
    max_frames: int
    fps: float | None
    num_frames: int | None
    of_frames: bool
    """Whether frames that a caller has already decoded are sampled too (do_sample_frames)."""

    def indices(
        self, total: int, fps: float | None, options: Mapping[str, Any], *, is_file: bool
    ) -> list[int]:
        """Indices of the sampled frames among `total` frames. `options`: from the request. Raises
        RequestError."""
        asked = options.get("fps") is not None or options.get("num_frames") is not None
        if not options.get("do_sample_frames", asked or is_file or self.of_frames):
            return list(range(total))
        count = self._count(total, fps, options, is_file)
        if count is None:
            return list(range(total))
        if count > total:
            raise RequestError(f"num_frames is {count}, and it has {total} frames.")
        # A video of one frame is taken as it is. Transformers divides by zero.
        step = total / max(count, 1)
        # torch.arange computes in 32 bits, and may return more values than expected.
        return [
            int(number) for number in (np.arange(math.ceil(total / step)) * step).astype(np.float32)
        ]

    def _count(
        self, total: int, fps: float | None, options: Mapping[str, Any], is_file: bool
    ) -> int | None:
        """How many frames are taken; None: all."""
        patch = self.temporal_patch_size
        count: int | None = options.get("num_frames")
        rate: float | None = options.get("fps")
        if count is None and rate is None:
            count = self.num_frames
            rate = self.fps
            if count is None and rate is None and is_file:
                rate = _FPS
        if count is not None:
            return max(patch, round(count / patch) * patch)
        if rate is None:
            return None
        if fps is None:
            raise unknown_rate("num_frames in the place of fps")
        most = min(self.max_frames, total) // patch * patch
        return (
            math.floor(min(max(total / fps * rate, self.min_frames), most, total) / patch) * patch
        )

    def seconds(self, taken: int, total: int, fps: float | None) -> float:
        """Between groups of frames that are one patch, where `taken` of `total` are taken."""
        return self.temporal_patch_size / (UNKNOWN_FPS if fps is None else taken / total * fps)


class EvenSampling(Sampling):
    """Qwen3-VL's: from the first frame to the last."""

    def indices(
        self, total: int, fps: float | None, options: Mapping[str, Any], *, is_file: bool
    ) -> list[int]:
        if not options.get("do_sample_frames", is_file or self.of_frames or bool(options)):
            return list(range(total))
        count: int | None = options.get("num_frames")
        rate: float | None = options.get("fps")
        if count is None and rate is None:
            count = self.num_frames
            rate = self.fps if count is None else None
        if rate is not None:
            count = int(total / (UNKNOWN_FPS if fps is None else fps) * rate)
            count = min(max(count, self.min_frames), self.max_frames, total)
        elif count is None:
            count = min(max(total, self.min_frames), self.max_frames)
        if count > total:
            raise RequestError(f"num_frames is {count}, and it has {total} frames.")
        found: list[int] = np.linspace(0, total - 1, count).round().astype(int).tolist()
        return found

    def times(self, indices: Sequence[int], fps: float | None) -> np.ndarray:
        """Seconds [patches]: means of each patch's first and last frame."""
        depth = self.temporal_patch_size
        rate = UNKNOWN_FPS if fps is None else fps
        every = [index / rate for index in indices]
        every += every[-1:] * (-len(every) % depth)
        return np.array(
            [(every[i] + every[i + depth - 1]) / 2 for i in range(0, len(every), depth)]
        )


@dataclass(frozen=True)
class MiddleSampling(Sampling):
    """InternVL's: from the middle of each of equal parts."""

    shift: float | None = None
    """Index of the first frame; None: the middle of the first part."""

    def indices(
        self, total: int, fps: float | None, options: Mapping[str, Any], *, is_file: bool
    ) -> list[int]:
        asked = options.get("fps") is not None or options.get("num_frames") is not None
        if not options.get("do_sample_frames", asked or is_file or self.of_frames):
            return list(range(total))
        count = self._count(total, fps, options, is_file)
        if count is None:
            return list(range(total))
        if count > total:
            raise RequestError(f"num_frames is {count}, and it has {total} frames.")
        return self._spread(total, count)

    def _spread(self, total: int, count: int) -> list[int]:
        part = total / count
        first = part / 2 if self.shift is None else self.shift
        # torch.arange computes in 32 bits.
        every = first + np.arange(max(math.ceil((total - first) / part), 0)) * part
        return [min(int(number), total - 1) for number in every.astype(np.float32)]

    def _count(
        self, total: int, fps: float | None, options: Mapping[str, Any], is_file: bool
    ) -> int | None:
        count: int | None = options.get("num_frames")
        rate: float | None = options.get("fps")
        if count is None and rate is None:
            count = self.num_frames
            rate = self.fps or (_FPS if is_file else None)
        if count is not None or rate is None:
            return count
        if fps is None:
            raise unknown_rate("num_frames in the place of fps")
        # Transformers refuses more frames than there are.
        return min(max(int(total / fps * rate), 1), total)


class UniformSampling(MiddleSampling):
    """Sampling of LLaVA-OneVision and Gemma 4, transformers' usual one: from the start of each of
    equal parts."""

    def _count(
        self, total: int, fps: float | None, options: Mapping[str, Any], is_file: bool
    ) -> int | None:
        count = super()._count(total, fps, options, is_file)
        # A checkpoint's num_frames is for longer videos, which transformers alone takes.
        return count if count is None or options.get("num_frames") else min(count, total)

    def _spread(self, total: int, count: int) -> list[int]:
        return [number * total // count for number in range(count)]


@dataclass(frozen=True)
class EdgeSampling(Sampling):
    """SmolVLM's: as many frames a second as it says, and at most so many, from the first to the
    last. Of a long video, the first and the last second are left out."""

    def indices(
        self, total: int, fps: float | None, options: Mapping[str, Any], *, is_file: bool
    ) -> list[int]:
        asked = options.get("fps") is not None or options.get("num_frames") is not None
        if not options.get("do_sample_frames", asked or is_file or self.of_frames):
            return list(range(total))
        if fps is None:
            raise unknown_rate("do_sample_frames: false")
        rate: float = options.get("fps") or self.fps or 1
        most: int = options.get("num_frames") or self.num_frames or _MOST_EDGE_FRAMES
        seconds = total / fps
        count = max(min(round(rate * seconds), most), 1)
        skipped = int(fps) if seconds - 2 > most * rate else 0
        last = min(int(total - fps), total - 1) if skipped else total - 1
        if skipped >= last:
            skipped = 0
            last = total - 1
        found: list[int] = np.unique(np.linspace(skipped, last, count, dtype=int)).tolist()
        return found


def unknown_rate(instead: str) -> RequestError:
    """Error for frames without a rate. `instead`: another way to sample them."""
    return RequestError(
        f'its frames come at an unknown rate: give (frames, {{"fps": ...}}), or {instead}.'
    )


def check_sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a request that are of sampling. Raises RequestError."""
    chosen = {name: values[name] for name in OPTIONS if values.get(name) is not None}
    if {"fps", "num_frames"} <= set(chosen):
        raise refusal("fps and num_frames cannot be set together.")
    if "fps" in chosen:
        try:
            chosen["fps"] = checked_fps(chosen["fps"])
        except RequestError as error:
            raise refusal(str(error)) from error
    count = chosen.get("num_frames", 1)
    if type(count) is not int or not 0 < count < 2**31:
        raise refusal("num_frames must be an integer of at least 1.")
    if type(chosen.get("do_sample_frames", True)) is not bool:
        raise refusal("do_sample_frames must be true or false.")
    if chosen.get("do_sample_frames") is False and len(chosen) > 1:
        raise refusal(
            "do_sample_frames: false takes all frames, so that fps and num_frames make no sense."
        )
    return chosen
