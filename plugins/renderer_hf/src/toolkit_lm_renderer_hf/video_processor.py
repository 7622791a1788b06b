"""The checkpoint's video processor, without torchvision: its image processor makes the arrays of
frames, as Qwen2-VL has them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image
from toolkit_lm.errors import CheckpointError, RequestError

from toolkit_lm_renderer_hf.image_processor import (
    QWEN,
    VIDEO_FILE,
    ImageProcessor,
    check_ratio,
    chosen_size,
    run,
)
from toolkit_lm_renderer_hf.sampling import Sampling, check_sampling
from toolkit_lm_renderer_hf.tokenizer import read_json

DEFAULTS: dict[str, Any] = {
    "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
    "resample": 3,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "rescale_factor": 1 / 255,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_frames": 4,
    "max_frames": 768,
    "do_sample_frames": False,
    "cap_pixels_per_frame": False,
    "max_video_tokens": 128000,
    "fps": None,
    "num_frames": None,
}
"""Defaults of transformers' Qwen2VLVideoProcessor."""
_MOST = 2**20
_COUNTS = {"patch_size": 256, "temporal_patch_size": 64, "merge_size": 64}
_COUNTS |= dict.fromkeys(("min_frames", "max_frames", "max_video_tokens"), _MOST)
"""Integers, and the most that a checkpoint may state."""
_SHARE = 0.9
"""Share of max_video_tokens that the frames of one video may use."""


class VideoProcessor:
    """Makes arrays of videos, one at a time. Thread-safe."""

    defaults: ClassVar[Mapping[str, Any]] = DEFAULTS
    """Of the class in transformers."""
    names: ClassVar[re.Pattern[str]] = QWEN
    """Names of processors in transformers whose videos these are."""
    by_patches: ClassVar[bool] = True
    """Whether the image processor makes patches, of which frames are."""

    def __init__(
        self, folder: Path, images: ImageProcessor, max_pixels: int, *, timed: bool
    ) -> None:
        """`max_pixels`: limit for all frames together. `timed`: the model is told the frame
        times."""
        self._folder = folder
        self._images = images
        self._max_pixels = max_pixels
        self._timed = timed
        self._lock = threading.Lock()

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Processor options from a request; they can only make frames smaller or fewer. Raises
        RequestError."""
        sizes = (
            {"size": chosen_size(options, self._config["size"])}
            if {"size", "min_pixels", "max_pixels"} & set(options)
            else {}
        )
        return sizes | check_sampling(options)

    @property
    def sampling(self) -> Sampling:
        """Raises RequestError for a model whose videos are processed otherwise, CheckpointError for
        a config of no sense."""
        config = self._config
        return Sampling(
            config["temporal_patch_size"],
            config["min_frames"],
            config["max_frames"],
            config["fps"],
            config["num_frames"],
            config["do_sample_frames"] is True,
        )

    def process(
        self,
        frames: Iterable[np.ndarray],
        count: int,
        options: Mapping[str, Any],
        check: Callable[[int], None],
    ) -> dict[str, np.ndarray]:
        """The arrays of `count` frames, uint8 [height, width, 3], read one by one. Raises
        RequestError.

        `check` hears how many tokens it will be, before anything is processed.
        """
        config = self._config
        processor = self._images.loaded
        made: np.ndarray | None = None
        depth = config["temporal_patch_size"]
        patch = config["patch_size"]
        num_groups = -(-count // depth)
        height = width = 0
        for number, pixels in enumerate(frames):
            if made is None:
                height, width = self._target(pixels.shape[0], pixels.shape[1], count, options)
                check(num_groups * height * width // (patch * config["merge_size"]) ** 2)
                made = np.empty(
                    (num_groups, height * width // patch**2, pixels.shape[2], depth, patch**2),
                    np.float32,
                )
            image = Image.fromarray(pixels)
            if image.size != (width, height):
                image = image.resize((width, height), config["resample"])
            patches = run(processor, np.asarray(image), self._frame_options)["pixel_values"]
            made[number // depth, :, :, number % depth] = patches.reshape(
                made.shape[1], made.shape[2], -1
            )
        assert made is not None and number == count - 1, (
            "there are as many frames as were asked for"
        )
        last = made[-1]
        used = (count - 1) % depth + 1
        # Its last frame stands in for those that are missing.
        last[:, :, used:] = last[:, :, used - 1 : used]
        grid = np.array([[num_groups, height // patch, width // patch]], np.int64)
        return {
            "pixel_values_videos": made.reshape(num_groups * made.shape[1], -1),
            "video_grid_thw": grid,
        }

    def clock(self, indices: Sequence[int], total: int, fps: float | None) -> dict[str, np.ndarray]:
        """Data of the times of sampled frames, `indices` of `total`, for the model."""
        if not self._timed:
            return {}
        seconds = self.sampling.seconds(len(indices), total, fps)
        return {"second_per_grid_ts": np.array([seconds])}

    def _target(
        self, height: int, width: int, count: int, options: Mapping[str, Any]
    ) -> tuple[int, int]:
        """The size that frames are resized to."""
        config = self._config
        check_ratio(height, width)
        size = options.get("size") or config["size"]
        factor = config["patch_size"] * config["merge_size"]
        if config["do_resize"]:
            height, width = self._resized(height, width, count, size)
        elif height % factor or width % factor:
            raise RequestError(
                f"it has {width} x {height} pixels; the checkpoint takes multiples of {factor}."
            )
        if count * height * width > self._max_pixels:
            counted = (
                f"its {count} frames of {width} x {height} pixels are more than the "
                f"{self._max_pixels} pixels that are taken"
            )
            raise RequestError(
                f"{counted} (max_media_pixels). mm_processor_kwargs may ask for fewer: "
                "max_pixels, fps, num_frames."
            )
        return height, width

    def _resized(
        self, height: int, width: int, count: int, size: Mapping[str, int]
    ) -> tuple[int, int]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        config = self._config
        factor = config["patch_size"] * config["merge_size"]
        most = size["longest_edge"]
        if config["cap_pixels_per_frame"]:
            total = int(config["max_video_tokens"] * factor * factor * _SHARE)
            most = max(
                min(most, total * config["temporal_patch_size"] // count),
                int(size["shortest_edge"] * 1.05),
            )
        found: tuple[int, int] = smart_resize(height, width, factor, size["shortest_edge"], most)
        return found

    @property
    def _config(self) -> dict[str, Any]:
        with self._lock:
            return self._read

    @cached_property
    def _read(self) -> dict[str, Any]:
        found = self._stated()
        name = found.get("video_processor_type") or found.get("image_processor_type")
        if hasattr(self._images.loaded, "temporal_patch_size") < self.by_patches or (
            name is not None and not self.names.fullmatch(str(name))
        ):
            raise RequestError(
                "this renderer processes videos for Qwen-VL, GLM-V, InternVL and their like, and "
                f"transformers' {name or 'processor of this model'} needs "
                "torchvision. Give video_embeds."
            )
        config = {
            key: default if found.get(key) is None else found[key]
            for key, default in self.defaults.items()
        }
        config["size"] = dict(config["size"]) if isinstance(config["size"], Mapping) else {}
        for option, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            stated = (
                config["size"].pop(option, None) if found.get(option) is None else found[option]
            )
            if stated is not None:
                config["size"][edge] = stated
        self._check(config)
        return config

    def _stated(self) -> Mapping[str, Any]:
        """The video processor's settings: a part of processor_config.json, else a file of its own,
        else the image processor's file. Transformers reads them in the same order."""
        nested = self._json("processor_config.json").get("video_processor")
        return (
            nested
            if isinstance(nested, Mapping)
            else self._json(VIDEO_FILE) or self._json("preprocessor_config.json")
        )

    def _json(self, name: str) -> Mapping[str, Any]:
        path = self._folder / name
        return read_json(path) if path.is_file() else {}

    def _check(self, config: Mapping[str, Any]) -> None:
        bounds = [(name, config[name], most) for name, most in _COUNTS.items()]
        bounds += [
            (name, config["size"].get(name), self._max_pixels)
            for name in ("shortest_edge", "longest_edge")
        ]
        bounds += (
            [("num_frames", config["num_frames"], _MOST)]
            if config["num_frames"] is not None
            else []
        )
        self._check_bounds(config, bounds)

    def _check_bounds(
        self, config: Mapping[str, Any], bounds: Sequence[tuple[str, Any, int]]
    ) -> None:
        """Raises CheckpointError for a number outside of its bounds, and for numbers of pixels that
        are none."""
        for name, number, most in bounds:
            if type(number) is not int or not 0 < number <= most:
                raise CheckpointError(
                    f"{self._folder}: the video processor's {name} is {number!r:.50}; it may be "
                    f"from 1 to {most}."
                )
        numbers = [
            config["rescale_factor"],
            *config["image_mean"],
            *config["image_std"],
            1 if config["fps"] is None else config["fps"],
        ]
        if (
            not all(isinstance(number, int | float) for number in numbers)
            or min(numbers[0], numbers[-1]) <= 0
        ):
            raise CheckpointError(
                f"{self._folder}: the video processor's numbers are not numbers: {numbers!r:.200}."
            )

    @cached_property
    def _frame_options(self) -> dict[str, Any]:
        """Options of the image processor. Scaling is a part of normalizing, in the order and the
        precision of transformers' videos."""
        config = self._config
        mean = config["image_mean"]
        std = config["image_std"]
        scale = config["rescale_factor"]
        fused = config["do_rescale"] and config["do_normalize"]
        if fused:
            mean, std = (
                (np.array(numbers, np.float32) * np.float32(1 / scale)).tolist()
                for numbers in (mean, std)
            )
        return {
            "do_resize": False,
            "do_rescale": config["do_rescale"] and not fused,
            "rescale_factor": scale,
            "do_normalize": config["do_normalize"],
            "image_mean": mean,
            "image_std": std,
            "patch_size": config.get("patch_size"),
            "merge_size": config.get("merge_size"),
            # An image processor would repeat the frame.
            "temporal_patch_size": 1,
        }
