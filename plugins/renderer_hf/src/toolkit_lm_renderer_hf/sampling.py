"""Which frames of a video a checkpoint takes, as transformers' Qwen2VLVideoProcessor has it."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
_UNKNOWN_FPS = 24.0
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
            raise RequestError(
                'its frames come at an unknown rate: give (frames, {"fps": ...}), or num_frames '
                "in the place of fps."
            )
        most = min(self.max_frames, total) // patch * patch
        return (
            math.floor(min(max(total / fps * rate, self.min_frames), most, total) / patch) * patch
        )

    def seconds(self, taken: int, total: int, fps: float | None) -> float:
        """Between groups of frames that are one patch, where `taken` of `total` are taken."""
        return self.temporal_patch_size / (_UNKNOWN_FPS if fps is None else taken / total * fps)


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
