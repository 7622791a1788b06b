"""Video processors of families other than Qwen2-VL: Qwen3-VL's and GLM's, whose frames are told
their times, and those of InternVL, LLaVA-OneVision and SmolVLM, whose frames are pictures of one
size."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image
from toolkit_lm.errors import CheckpointError, RequestError

from toolkit_lm_renderer_hf.glm_sampling import LengthSampling, SecondSampling
from toolkit_lm_renderer_hf.image_processor import (
    VIDEO_FILE,
    ImageProcessor,
    check_ratio,
    refusal,
    run,
)
from toolkit_lm_renderer_hf.sampling import (
    UNKNOWN_FPS,
    EdgeSampling,
    EvenSampling,
    MiddleSampling,
    Sampling,
    UniformSampling,
)
from toolkit_lm_renderer_hf.tokenizer import read_json
from toolkit_lm_renderer_hf.video_processor import DEFAULTS, VideoProcessor

TIMES = "timestamps"
"""Name of the array [patches in time] of seconds."""
_QWEN3 = re.compile("Qwen3VLVideoProcessor(Fast)?")
_QWEN3_TYPES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_GLM41 = re.compile("Glm4vVideoProcessor(Fast)?")
_GLM41_TYPES = ("glm4v", "glm4v_moe")
_GLM46 = re.compile("Glm46VVideoProcessor(Fast)?")
_GLM46_TYPES = ("glm46v", "glm_ocr")
_INTERNVL = re.compile("InternVLVideoProcessor(Fast)?")
_ONEVISION = re.compile("LlavaOnevisionVideoProcessor")
_GEMMA4 = re.compile("Gemma4VideoProcessor(Fast)?")
_SMOLVLM = re.compile("SmolVLMVideoProcessor(Fast)?")
_MOST_EDGE = 4096


class TimedVideoProcessor(VideoProcessor):
    """Qwen3-VL's. The bounds of a size count the pixels of all frames together."""

    defaults = {
        **DEFAULTS,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": 16,
        "do_sample_frames": True,
        "max_video_tokens": 768,
        "fps": 2,
    }
    # Without a file of its own, the image processor's is read.
    names = re.compile(f"{_QWEN3.pattern}|Qwen2VLImageProcessor(Fast|Pil)?")

    @property
    def sampling(self) -> EvenSampling | SecondSampling:
        config = self._config
        return EvenSampling(
            config["temporal_patch_size"],
            config["min_frames"],
            config["max_frames"],
            config["fps"],
            config["num_frames"],
            config["do_sample_frames"] is True,
        )

    def clock(self, indices: Sequence[int], total: int, fps: float | None) -> dict[str, np.ndarray]:
        return {TIMES: self.sampling.times(indices, fps)}

    def _resized(
        self, height: int, width: int, count: int, size: Mapping[str, int]
    ) -> tuple[int, int]:
        config = self._config
        depth = config["temporal_patch_size"]
        factor = config["patch_size"] * config["merge_size"]
        if count < depth:
            raise RequestError(f"{count} of its frames are taken; the model needs {depth} or more.")
        least = size["shortest_edge"]
        most = size["longest_edge"]
        if config["cap_pixels_per_frame"]:
            cap = min(config["max_video_tokens"] * factor**2, most // count)
            most = max(cap, int(least * 1.05)) * count
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        check_ratio(height, width)
        rows = round(height / factor) * factor
        columns = round(width / factor) * factor
        pixels = round(count / depth) * depth * rows * columns
        if pixels > most:
            share = math.sqrt(count * height * width / most)
            rows = max(factor, math.floor(height / share / factor) * factor)
            columns = max(factor, math.floor(width / share / factor) * factor)
        elif pixels < least:
            share = math.sqrt(least / (count * height * width))
            rows = math.ceil(height * share / factor) * factor
            columns = math.ceil(width * share / factor) * factor
        return rows, columns


class Glm41VideoProcessor(TimedVideoProcessor):
    """GLM-4.1V's, whose frames are sampled by the second."""

    defaults = {
        **DEFAULTS,
        "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000},
        "do_sample_frames": True,
        "max_duration": 300,
        "fps": 2,
    }
    names = re.compile(f"{_GLM41.pattern}|Glm4vImageProcessor(Fast|Pil)?")
    sampling_class: ClassVar[type[SecondSampling]] = SecondSampling
    unused: ClassVar[Sequence[str]] = ("num_frames",)
    """Options of a request that its sampling knows nothing of."""

    @property
    def sampling(self) -> SecondSampling:
        config = self._config
        return self.sampling_class(
            config["temporal_patch_size"],
            config["min_frames"],
            config["max_frames"],
            config["fps"],
            config["num_frames"],
            config["do_sample_frames"] is True,
            config["max_duration"],
        )

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        for name in self.unused:
            if options.get(name) is not None:
                raise refusal(f"{name} cannot be set: this model takes frames by the clock.")
        return super().options(options)

    def _check(self, config: Mapping[str, Any]) -> None:
        super()._check(config)
        self._check_bounds(config, [("max_duration", config["max_duration"], 2**20)])


class Glm46VideoProcessor(Glm41VideoProcessor):
    """GLM-4.6V's, of longer videos fewer frames of a second."""

    names = re.compile(f"{_GLM46.pattern}|Glm46VImageProcessor(Fast|Pil)?")
    sampling_class = LengthSampling
    unused = ("num_frames", "fps")


class TileVideoProcessor(VideoProcessor):
    """InternVL's: each frame is one tile [channels, S, S]."""

    defaults = {
        "size": {"height": 384, "width": 384},
        "resample": 3,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "rescale_factor": 1 / 255,
        "do_sample_frames": False,
        "initial_shift": True,
        "fps": None,
        "num_frames": None,
    }
    names = re.compile(f"{_INTERNVL.pattern}|GotOcr2ImageProcessor(Fast|Pil)?")
    by_patches = False

    @property
    def sampling(self) -> Sampling:
        config = self._config
        shift = config["initial_shift"]
        return MiddleSampling(
            1,
            1,
            2**20,
            config["fps"],
            config["num_frames"],
            config["do_sample_frames"] is True,
            None if shift is True else float(shift),
        )

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        if found := sorted({"size", "min_pixels", "max_pixels"} & set(options)):
            raise RequestError(f"{found[0]} cannot be set: frames have one size.")
        return super().options(options)

    def clock(self, indices: Sequence[int], total: int, fps: float | None) -> dict[str, np.ndarray]:
        return {}

    def process(
        self,
        frames: Iterable[np.ndarray],
        count: int,
        options: Mapping[str, Any],
        check: Callable[[int], None],
    ) -> dict[str, np.ndarray]:
        height, width = self.frame_size
        if count * height * width > self._max_pixels:
            raise RequestError(
                f"its {count} frames of {width} x {height} pixels are more than "
                f"the {self._max_pixels} pixels that are taken (max_media_pixels). "
                "mm_processor_kwargs may ask for fewer: fps, num_frames."
            )
        tiles = []
        for pixels in frames:
            check_ratio(*pixels.shape[:2])
            tiles.append(self._tile(pixels).astype(np.float32))
        return {"pixel_values_videos": np.concatenate(tiles)}

    @property
    def frame_size(self) -> tuple[int, int]:
        """Height and width of a frame's tile."""
        size = self._config["size"]
        return size["height"], size["width"]

    def _tile(self, pixels: np.ndarray) -> np.ndarray:
        """Tile [1, channels, S, S] of a frame, uint8 [height, width, 3]."""
        return run(self._images.loaded, pixels, self._tile_options)["pixel_values"]

    @property
    def _tile_options(self) -> dict[str, Any]:
        config = self._config
        left_out = ("patch_size", "merge_size", "temporal_patch_size")
        own = {
            "size": config["size"],
            "resample": config["resample"],
            "do_resize": config["do_resize"],
            "crop_to_patches": False,
        }
        scaling = {
            name: value for name, value in self._frame_options.items() if name not in left_out
        }
        return scaling | own

    def _check(self, config: Mapping[str, Any]) -> None:
        bounds = [(name, config["size"].get(name), _MOST_EDGE) for name in ("height", "width")]
        if config["num_frames"] is not None:
            bounds.append(("num_frames", config["num_frames"], 2**20))
        shift = config["initial_shift"]
        if not isinstance(shift, int | float) or not 0 <= shift <= 2**20:
            raise CheckpointError(
                f"{self._folder}: the video processor's initial_shift is {shift!r:.50}; it must be "
                "true, or an index."
            )
        self._check_bounds(config, bounds)


class OneVisionVideoProcessor(TileVideoProcessor):
    """LLaVA-OneVision's: each frame is one tile, the whole of it."""

    names = re.compile(f"{_ONEVISION.pattern}|LlavaOnevisionImageProcessor(Fast|Pil)?")

    @property
    def sampling(self) -> UniformSampling:
        config = self._config
        return UniformSampling(
            1,
            1,
            2**20,
            config["fps"],
            config["num_frames"],
            config["do_sample_frames"] is True,
        )

    def _tile(self, pixels: np.ndarray) -> np.ndarray:
        size = self._config["size"]
        own = {"image_grid_pinpoints": [[size["height"], size["width"]]]}
        options = {
            name: self._tile_options[name] for name in self._tile_options if "crop" not in name
        }
        # The whole of a picture comes before its tiles.
        return run(self._images.loaded, pixels, options | own)["pixel_values"][0, :1]


class PooledVideoProcessor(OneVisionVideoProcessor):
    """Gemma 4's: frames of any size [patches, numbers of a patch], each with its time."""

    defaults = {
        **TileVideoProcessor.defaults,
        "image_mean": [0.0, 0.0, 0.0],
        "image_std": [1.0, 1.0, 1.0],
        "do_sample_frames": True,
        "num_frames": 32,
        "patch_size": 16,
        "max_soft_tokens": 70,
        "pooling_kernel_size": 3,
    }
    names = re.compile(f"{_GEMMA4.pattern}|Gemma4ImageProcessor(Fast|Pil)?")

    def clock(self, indices: Sequence[int], total: int, fps: float | None) -> dict[str, np.ndarray]:
        return {TIMES: np.array(indices) / (UNKNOWN_FPS if fps is None else fps)}

    def process(
        self,
        frames: Iterable[np.ndarray],
        count: int,
        options: Mapping[str, Any],
        check: Callable[[int], None],
    ) -> dict[str, np.ndarray]:
        config = self._config
        side = config["patch_size"] * config["pooling_kernel_size"]
        if count * config["max_soft_tokens"] * side**2 > self._max_pixels:
            raise RequestError(
                f"its {count} frames of {config['max_soft_tokens']} x {side**2} pixels are more "
                f"than the {self._max_pixels} pixels that are taken (max_media_pixels). "
                "mm_processor_kwargs may ask for fewer: fps, num_frames."
            )
        names = ("patch_size", "max_soft_tokens", "pooling_kernel_size", "do_resize", "resample")
        own = {name: config[name] for name in names}
        left_out = ("merge_size", "temporal_patch_size")
        scaling = {
            name: value for name, value in self._frame_options.items() if name not in left_out
        }
        made = []
        for pixels in frames:
            check_ratio(*pixels.shape[:2])
            made.append(run(self._images.loaded, pixels, scaling | own))
            if len(made) == 1:
                num_patches = int((made[0]["image_position_ids"][0, :, 0] >= 0).sum())
                check(count * num_patches // config["pooling_kernel_size"] ** 2)
        return {
            "pixel_values_videos": np.concatenate([frame["pixel_values"] for frame in made]),
            "video_position_ids": np.concatenate([frame["image_position_ids"] for frame in made]),
        }

    def _check(self, config: Mapping[str, Any]) -> None:
        bounds = [
            ("patch_size", config["patch_size"], 256),
            ("max_soft_tokens", config["max_soft_tokens"], 2**16),
            ("pooling_kernel_size", config["pooling_kernel_size"], 64),
        ]
        if config["num_frames"] is not None:
            bounds.append(("num_frames", config["num_frames"], 2**20))
        self._check_bounds(config, bounds)


class SquareVideoProcessor(TileVideoProcessor):
    """SmolVLM's: each frame is resized to its longer side, and then to one square tile."""

    defaults = {
        **TileVideoProcessor.defaults,
        "size": {"longest_edge": 4 * 364},
        "max_image_size": {"longest_edge": 364},
        "resample": 1,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    names = re.compile(f"{_SMOLVLM.pattern}|SmolVLMImageProcessor(Fast|Pil)?")

    @property
    def sampling(self) -> EdgeSampling:
        config = self._config
        return EdgeSampling(
            1,
            1,
            2**20,
            config["fps"],
            config["num_frames"],
            config["do_sample_frames"] is True,
        )

    @property
    def frame_size(self) -> tuple[int, int]:
        side = self._config["max_image_size"]["longest_edge"]
        return side, side

    def clock(self, indices: Sequence[int], total: int, fps: float | None) -> dict[str, np.ndarray]:
        if fps is None:
            return {TIMES: np.array(indices) / UNKNOWN_FPS}
        return {TIMES: np.array(indices) / fps, "duration": np.array([total / fps])}

    def process(
        self,
        frames: Iterable[np.ndarray],
        count: int,
        options: Mapping[str, Any],
        check: Callable[[int], None],
    ) -> dict[str, np.ndarray]:
        made = super().process(frames, count, options, check)
        return {"pixel_values": made["pixel_values_videos"][None]}

    def _tile(self, pixels: np.ndarray) -> np.ndarray:
        height, width = pixels.shape[:2]
        side = self.frame_size[0]
        image = Image.fromarray(pixels)
        if self._config["do_resize"]:
            longest = self._config["size"]["longest_edge"]
            ratio = width / height
            # The shorter side is even, as transformers' videos have it.
            short = int(longest / ratio if ratio >= 1 else longest * ratio)
            short = max(short + short % 2, 1)
            size = (longest, short) if ratio >= 1 else (short, longest)
            for target in (size, (side, side)):
                image = image.resize(target, self._config["resample"])
        elif (height, width) != (side, side):
            raise RequestError(
                f"it has {width} x {height} pixels; the checkpoint takes {side} x {side}."
            )
        options = {name: value for name, value in self._tile_options.items() if "crop" not in name}
        own = {"do_resize": False, "do_image_splitting": False}
        whole = {**options, **own, "max_image_size": {"longest_edge": side}}
        tile: np.ndarray = run(self._images.loaded, np.asarray(image), whole)["pixel_values"][0]
        return tile

    def _stated(self) -> Mapping[str, Any]:
        found = dict(super()._stated())
        if isinstance(sampling := found.get("video_sampling"), Mapping):
            named = {"num_frames": "max_frames", "fps": "fps", "size": "video_size"}
            of_sampling = {name: sampling.get(stated) for name, stated in named.items()}
            if "size" in found:
                del of_sampling["size"]
            found |= of_sampling
        return found

    def _check(self, config: Mapping[str, Any]) -> None:
        bounds: list[tuple[str, Any, int]] = []
        for name in ("size", "max_image_size"):
            edge = config[name].get("longest_edge") if isinstance(config[name], Mapping) else None
            bounds.append((f"longest_edge of {name}", edge, _MOST_EDGE))
        if config["num_frames"] is not None:
            bounds.append(("num_frames", config["num_frames"], 2**20))
        self._check_bounds(config, bounds)


def video_processor_of(
    folder: Path, images: ImageProcessor, max_pixels: int, *, timed: bool
) -> VideoProcessor:
    """The processor of a checkpoint's videos. Arguments are those of VideoProcessor."""
    try:
        kind = _kind(folder)
    except CheckpointError:
        # Whoever reads the file says it with the first video.
        kind = VideoProcessor
    return kind(folder, images, max_pixels, timed=timed)


def _kind(folder: Path) -> type[VideoProcessor]:
    found: list[Mapping[str, Any]] = [
        read_json(path) if (path := folder / name).is_file() else {}
        for name in ("processor_config.json", VIDEO_FILE, "config.json")
    ]
    nested = found[0].get("video_processor")
    stated = nested if isinstance(nested, Mapping) else found[1]
    name = str(stated.get("video_processor_type") or "")
    model = found[2].get("model_type")
    if _QWEN3.fullmatch(name) or (not name and model in _QWEN3_TYPES):
        return TimedVideoProcessor
    if _GLM41.fullmatch(name) or (not name and model in _GLM41_TYPES):
        return Glm41VideoProcessor
    if _GLM46.fullmatch(name) or (not name and model in _GLM46_TYPES):
        return Glm46VideoProcessor
    if _INTERNVL.fullmatch(name) or (not name and model == "internvl"):
        return TileVideoProcessor
    if _GEMMA4.fullmatch(name) or (not name and model == "gemma4"):
        return PooledVideoProcessor
    if _ONEVISION.fullmatch(name) or (not name and model == "llava_onevision"):
        return OneVisionVideoProcessor
    if _SMOLVLM.fullmatch(name) or (not name and model == "smolvlm"):
        return SquareVideoProcessor
    return VideoProcessor
