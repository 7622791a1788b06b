"""The checkpoint's image processor: transformers' own, computed by Pillow and numpy. It is imported with the first image."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import re
import threading
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from toolkit_lm.errors import CheckpointError, RequestError, nearest

from toolkit_lm_renderer_hf.tokenizer import read_json

logger = logging.getLogger(__name__)

_FILES = ("preprocessor_config.json", "processor_config.json")
_PACKAGES = ("transformers", "pillow", "numpy", "toolkit-lm-renderer-hf")
_OPTIONS = {"size": None, "min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
"""Those that a request may set, and the part of `size` that two of them are."""
_MOST_RATIO = 200
"""Of an image's sides, as Qwen2-VL has it."""
_MOST_EDGE = 4096
"""And any other number that a checkpoint states."""
_PIXEL_COUNTS = ("shortest_edge", "longest_edge", "min_pixels", "max_pixels")
_MOST_CROPS = 64
_CROPS = re.compile("crops|tiles")
_MOST_REASON = 300


class ImageProcessor:
    """Makes arrays of images, one at a time. Thread-safe. Raises CheckpointError where the folder says of none."""

    def __init__(self, folder: Path, max_pixels: int) -> None:
        self._folder = folder
        self._max_pixels = max_pixels
        self._lock = threading.Lock()
        found = [path for name in _FILES if (path := folder / name).is_file()]
        if not found:
            raise CheckpointError(f"{folder} has neither {' nor '.join(_FILES)}, which say how images are processed.")
        for path in found:
            read_json(path)
        if importlib.util.find_spec("transformers") is None:
            raise CheckpointError("images need transformers: pip install 'toolkit-lm-renderer-hf[multimodal]'.")
        self.fingerprint = _fingerprint([*found, folder / "config.json"])
        """Of all that decides what arrays come of an image."""

    def options(self, given: Any) -> dict[str, Any]:
        """Those of a request, which may make images smaller. Raises RequestError."""
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            raise _refusal(f"it must be a mapping, not a {type(given).__name__}.")
        for name in given:
            if name not in _OPTIONS:
                raise _refusal(f"{name!r:.100} cannot be set by a request. {nearest(str(name)[:100], _OPTIONS)}")
        return {"size": self._size(given)} if given else {}

    def process(self, pixels: np.ndarray, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The arrays of an image, uint8 [height, width, 3]. Raises RequestError where the processor refuses it."""
        processor = self._loaded
        height, width = pixels.shape[:2]
        self._check_sides(height, width, options.get("size") or processor.size)
        try:
            made = processor(pixels, return_tensors="np", input_data_format="channels_last", **options)
        except Exception as error:  # whatever a processor raises for a size that it cannot make
            raise RequestError(f"the checkpoint's processor cannot read it: {str(error)[:_MOST_REASON]}") from error
        return {name: np.ascontiguousarray(array) for name, array in made.items() if isinstance(array, np.ndarray)}

    @property
    def _loaded(self) -> Any:
        with self._lock:
            return self._processor

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor

        try:
            made = AutoImageProcessor.from_pretrained(  # nosec B615 # a folder, and nothing is fetched
                str(self._folder), backend="pil", trust_remote_code=False, local_files_only=True
            )
        except Exception as error:  # whatever its own reader raises
            raise CheckpointError(f"{self._folder}: transformers cannot make the image processor: {error}") from error
        if getattr(made, "backend", "pil") != "pil":
            raise CheckpointError(f"{self._folder}: {type(made).__name__} needs torchvision, and there is no other of its kind.")
        self._check_config(made.to_dict(), hasattr(made, "merge_size"))
        logger.info("Images are processed by %s.", type(made).__name__)
        return made

    def _check_config(self, config: Mapping[str, Any], counts_pixels: bool) -> None:
        """Raises CheckpointError for numbers that would make images of any size. `counts_pixels`: edges count pixels, as Qwen's."""
        for name, number in _numbers(config):
            most = _MOST_CROPS if _CROPS.search(name) else _MOST_EDGE
            if counts_pixels and name in _PIXEL_COUNTS:
                most = self._max_pixels
            if abs(number) > most:
                raise CheckpointError(f"{self._folder}: the image processor's {name} is {number}; it may be {most}.")

    def _size(self, given: Mapping[str, Any]) -> dict[str, int]:
        own = {name: value for name, value in dict(self._loaded.size).items() if value is not None}
        size = dict(own)
        for option, value in given.items():
            part = _OPTIONS[option]
            changed = {part: value} if part is not None else value
            if not isinstance(changed, Mapping) or not set(changed) <= set(own):
                raise _refusal(f"{option} must be of the checkpoint's form, such as {own}.")
            size |= changed
        for name, number in size.items():
            if type(number) is not int or not 0 < number <= max(own.values()):
                raise _refusal(f"{name} must be an integer from 1 to the checkpoint's own, {max(own.values())}.")
        return size

    def _check_sides(self, height: int, width: int, size: Mapping[str, Any]) -> None:
        """A resize that keeps the ratio makes far more pixels of a narrow image than it has."""
        long, short = max(height, width), min(height, width)
        if long > _MOST_RATIO * short:
            raise RequestError(f"it has {width} x {height} pixels; a side may be {_MOST_RATIO} times as long as the other.")
        edges = dict(size)
        edge = edges.get("shortest_edge")
        if edge and not edges.get("longest_edge") and edge * edge * long > self._max_pixels * short:
            raise RequestError(f"it has {width} x {height} pixels, and would be resized to more than {self._max_pixels}.")


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """The integers of a config, with the key that each is under."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _numbers(one, str(key))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _numbers(one, name)
    elif isinstance(value, int):
        yield name, value


def _refusal(reason: str) -> RequestError:
    return RequestError(f"mm_processor_kwargs: {reason}", "mm_processor_kwargs")


def _fingerprint(paths: list[Path]) -> bytes:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(hashlib.sha256(path.read_bytes() if path.is_file() else b"").digest())
    for package in _PACKAGES:
        digest.update(f"{package}={metadata.version(package)};".encode())
    return digest.digest()
