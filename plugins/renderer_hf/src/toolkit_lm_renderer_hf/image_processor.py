"""The checkpoint's image processor: transformers' own, computed by Pillow and numpy. It is imported
with the first image."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from toolkit_lm.errors import CheckpointError, RequestError, nearest

from toolkit_lm_renderer_hf.tokenizer import read_json

logger = logging.getLogger(__name__)

_FILES = ("preprocessor_config.json", "processor_config.json")
VIDEO_FILE = "video_preprocessor_config.json"
_PACKAGES = ("transformers", "pillow", "numpy", "toolkit-lm-renderer-hf")
SIZES = {"size": None, "min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
"""Image options that a request may set. Two of them stand for a part of `size`, which is the value.
"""
_MOST_RATIO = 200
"""Largest ratio of an image's sides, the same as in Qwen2-VL."""
_MOST_EDGE = 4096
"""And any other number that a checkpoint states."""
_PIXEL_COUNTS = ("shortest_edge", "longest_edge", "min_pixels", "max_pixels")
_MOST_CROPS = 64
_CROPS = re.compile("crops|tiles")
_MOST_REASON = 300
QWEN = re.compile("Qwen2(_5_)?VL(Video|Image)Processor(Fast|Pil)?")
"""Names of processors whose pictures have as many tokens as their size says."""
PIXTRAL = re.compile("PixtralImageProcessor(Fast|Pil)?")
_ROWS_AND_COLUMNS = "return_row_col_info"


class ImageProcessor:
    """Makes arrays of images, one at a time. Thread-safe. Raises CheckpointError where the folder
    says of none."""

    def __init__(self, folder: Path, max_pixels: int) -> None:
        self._folder = folder
        self._max_pixels = max_pixels
        self._lock = threading.Lock()
        found = [path for name in _FILES if (path := folder / name).is_file()]
        if not found:
            raise CheckpointError(
                f"{folder} has neither {' nor '.join(_FILES)}, which say how images are processed."
            )
        for path in found:
            read_json(path)
        if importlib.util.find_spec("transformers") is None:
            raise CheckpointError(
                "images need transformers: pip install 'toolkit-lm-renderer-hf[multimodal]'."
            )
        self.fingerprint = _fingerprint([*found, folder / VIDEO_FILE, folder / "config.json"])
        """Digest of everything that decides which arrays an image or a video becomes."""

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Processor options from a request; they can only make images smaller. Raises
        RequestError."""
        return {"size": chosen_size(options, self.loaded.size)} if set(options) & set(SIZES) else {}

    def process(self, pixels: np.ndarray, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The arrays of an image, uint8 [height, width, 3]. Raises RequestError where the processor
        refuses it."""
        processor = self.loaded
        height, width = pixels.shape[:2]
        self._check_sides(height, width, options.get("size") or processor.size or {})
        return run(processor, pixels, {**self._own, **options})

    @cached_property
    def _own(self) -> dict[str, Any]:
        """Options of each call, which transformers' processor of the whole model gives."""
        if hasattr(self.loaded, _ROWS_AND_COLUMNS):
            return {_ROWS_AND_COLUMNS: True}
        if PIXTRAL.fullmatch(type(self.loaded).__name__):
            whole = read_json(self._folder / "processor_config.json")
            return {"patch_size": whole.get("patch_size", 16) * whole.get("spatial_merge_size", 1)}
        return {}

    def num_tokens(self, width: int, height: int, options: Mapping[str, Any]) -> int | None:
        """That stand for an image of this size, where that is known before it is processed: of
        Qwen2-VL and its like."""
        processor = self.loaded
        if not QWEN.fullmatch(type(processor).__name__) or not processor.do_resize:
            return None
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        check_ratio(height, width)
        try:
            size = options.get("size") or processor.size
            factor = processor.patch_size * processor.merge_size
            height, width = smart_resize(
                height, width, factor, size["shortest_edge"], size["longest_edge"]
            )
            num_tokens: int = (height // factor) * (width // factor)
        except (
            Exception
        ):  # whatever is raised for numbers that make no sense: the processor will say it better
            return None
        return num_tokens

    @property
    def loaded(self) -> Any:
        """The processor of transformers. Raises CheckpointError where it cannot be made."""
        with self._lock:
            return self._processor

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor

        try:
            # Reads a folder: nothing is fetched.
            made = AutoImageProcessor.from_pretrained(  # nosec B615
                str(self._folder), backend="pil", trust_remote_code=False, local_files_only=True
            )
        except Exception as error:  # whatever its own reader raises
            raise CheckpointError(
                f"{self._folder}: transformers cannot make the image processor: {error}"
            ) from error
        if getattr(made, "backend", "pil") != "pil":
            raise CheckpointError(
                f"{self._folder}: {type(made).__name__} needs torchvision, and there is no other "
                "of its kind."
            )
        self._check_config(made.to_dict(), hasattr(made, "merge_size"))
        logger.info("Images are processed by %s.", type(made).__name__)
        return made

    def _check_config(self, config: Mapping[str, Any], counts_pixels: bool) -> None:
        """Raises CheckpointError for numbers that would make images of any size. `counts_pixels`:
        edges count pixels, as Qwen's."""
        for name, number in _numbers(config):
            most = _MOST_CROPS if _CROPS.search(name) else _MOST_EDGE
            if counts_pixels and name in _PIXEL_COUNTS:
                most = self._max_pixels
            if abs(number) > most:
                raise CheckpointError(
                    f"{self._folder}: the image processor's {name} is {number}; it may be {most}."
                )

    def _check_sides(self, height: int, width: int, size: Mapping[str, Any]) -> None:
        """A resize that keeps the ratio makes far more pixels of a narrow image than it has."""
        check_ratio(height, width)
        long = max(height, width)
        short = min(height, width)
        edges = dict(size)
        edge = edges.get("shortest_edge")
        if edge and not edges.get("longest_edge") and edge * edge * long > self._max_pixels * short:
            raise RequestError(
                f"it has {width} x {height} pixels, and would be resized to more than "
                f"{self._max_pixels}."
            )


def check_options(options: Any, known: Iterable[str]) -> Mapping[str, Any]:
    """The options of a request. Raises RequestError where one is not `known`."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise refusal(f"it must be a mapping, not a {type(options).__name__}.")
    for name in options:
        if name not in known:
            raise refusal(
                f"{name!r:.100} cannot be set by a request. {nearest(str(name)[:100], known)}"
            )
    return options


def chosen_size(options: Mapping[str, Any], size: Any) -> dict[str, int]:
    """The checkpoint's size, changed by a request. Raises RequestError."""
    own = {name: value for name, value in dict(size or {}).items() if value is not None}
    if not own:
        raise refusal("the checkpoint's processor has no size.")
    chosen = dict(own)
    for option, part in SIZES.items():
        if option not in options:
            continue
        changed = {part: options[option]} if part is not None else options[option]
        if not isinstance(changed, Mapping) or not set(changed) <= set(own):
            raise refusal(f"{option} must be of the checkpoint's form, such as {own}.")
        chosen |= changed
    for name, number in chosen.items():
        if type(number) is not int or not 0 < number <= max(own.values()):
            raise refusal(
                f"{name} must be an integer from 1 to the checkpoint's own, {max(own.values())}."
            )
    return chosen


def check_ratio(height: int, width: int) -> None:
    """Raises RequestError for what is too narrow."""
    if max(height, width) > _MOST_RATIO * min(height, width):
        raise RequestError(
            f"it has {width} x {height} pixels; a side may be {_MOST_RATIO} times as long as the "
            "other."
        )


def run(processor: Any, pixels: np.ndarray, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays that a processor makes of an image. Raises RequestError."""
    try:
        made = processor(pixels, return_tensors="np", input_data_format="channels_last", **options)
    except Exception as error:  # whatever a processor raises for a size that it cannot make
        raise RequestError(
            f"the checkpoint's processor cannot read it: {str(error)[:_MOST_REASON]}"
        ) from error
    return {
        name: np.ascontiguousarray(array)
        for name, array in made.items()
        # Rows and columns of tiles are lists, whatever tensors were asked for.
        if isinstance(array, np.ndarray) or name in ("rows", "cols")
    }


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """The integers of a config, with the key that each is under."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(item, str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item, name)
    elif isinstance(value, int):
        yield name, value


def refusal(reason: str) -> RequestError:
    """RequestError for a bad option of a request."""
    return RequestError(f"mm_processor_kwargs: {reason}", "mm_processor_kwargs")


def _fingerprint(paths: list[Path]) -> bytes:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(hashlib.sha256(path.read_bytes() if path.is_file() else b"").digest())
    for package in _PACKAGES:
        digest.update(f"{package}={metadata.version(package)};".encode())
    return digest.digest()
