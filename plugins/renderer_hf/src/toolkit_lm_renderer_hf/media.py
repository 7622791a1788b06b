"""MediaReader: items of media become features of a prompt. It is imported for multimodal models only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import Array, MultiModalFeatureSpec, PlaceholderRange
from toolkit_lm.renderer import MultiModalRules, Replacement
from toolkit_lm.renderer.feature_lookup import FeatureLookup
from toolkit_lm_media.image import open_image
from toolkit_lm_media.limits import MediaLimits
from toolkit_lm_media.source import load_bytes

from toolkit_lm_renderer_hf.embeds import read_embeds
from toolkit_lm_renderer_hf.image_processor import ImageProcessor
from toolkit_lm_renderer_hf.media_items import Item

_FETCHES = 4
"""At a time, for one prompt."""


class ReadItem(NamedTuple):
    """An item, and what stands for it in a prompt."""

    modality: str
    identifier: str
    replacement: Replacement
    data: dict[str, Array] | None
    """None: the engine holds it."""

    def feature(self, offset: int) -> MultiModalFeatureSpec:
        """Of the item at a place of a prompt."""
        at = PlaceholderRange(offset, len(self.replacement.token_ids), self.replacement.mask)
        return MultiModalFeatureSpec(
            modality=self.modality, mm_identifier=self.identifier, mm_position=at, data=self.data, layout=self.replacement.layout
        )


@dataclass(frozen=True, slots=True)
class _Content:
    """What an item holds: one of the three."""

    kind: str
    file: bytes = b""
    pixels: np.ndarray | None = None
    arrays: Mapping[str, np.ndarray] | None = None

    def digest(self) -> bytes:
        digest = hashlib.sha256(self.file)
        arrays = {"": self.pixels} if self.pixels is not None else dict(self.arrays or {})
        for name in sorted(arrays):
            digest.update(repr((name, str(arrays[name].dtype), arrays[name].shape)).encode())
            digest.update(arrays[name].data)
        return digest.digest()


class MediaReader:
    """Reads items within the operator's bounds, and makes of them what the model's rules say. Thread-safe.

    Raises CheckpointError where the checkpoint does not say how, ConfigError for bounds that make no sense.
    """

    def __init__(self, config: VllmConfig, rules: MultiModalRules, folder: Path | None) -> None:
        """`folder`: of the checkpoint's image processor. None: no image is read."""
        self._rules = rules
        bounds = config.renderer
        self._limits = MediaLimits(
            max_bytes=bounds.max_media_bytes, max_pixels=bounds.max_media_pixels, allowed_hosts=tuple(bounds.allowed_media_hosts)
        )
        self._images = None if folder is None else ImageProcessor(folder, bounds.max_media_pixels)

    def read(self, items: Sequence[Item], options: Any, held: FeatureLookup | None) -> list[ReadItem]:
        """Each item once, however often it stands in a prompt. `options`: mm_processor_kwargs. Raises RequestError."""
        chosen = self._images.options(options) if self._images is not None else {}
        made: dict[str, ReadItem] = {}
        found = []
        for item, content in zip(items, self._contents(items), strict=True):
            identifier = self._identifier(item, content, chosen)
            if identifier not in made:
                made[identifier] = self._read(item, content, identifier, chosen, held)
            found.append(made[identifier])
        return found

    def _read(self, item: Item, content: _Content, identifier: str, options: Mapping[str, Any], held: FeatureLookup | None) -> ReadItem:
        known = held.get(identifier) if held is not None else None
        if known is not None:
            return ReadItem(item.modality, identifier, Replacement(known.token_ids, known.mask, known.layout), None)
        arrays = content.arrays
        if arrays is None:
            assert self._images is not None, "no image is read"
            pixels = content.pixels
            if pixels is None:
                pixels = open_image(content.file, self._limits, what=item.what, param=item.param)
            with _naming(item):
                arrays = self._images.process(pixels, options)
        with _naming(item):
            replacement = self._rules.replacement(item.modality, arrays)
        return ReadItem(item.modality, identifier, replacement, {name: Array.of(array) for name, array in arrays.items()})

    def _identifier(self, item: Item, content: _Content, options: Mapping[str, Any]) -> str:
        """Of the content and all that decides what is made of it; and of the caller's name, which cannot stand for the content."""
        said = json.dumps([item.modality, content.kind, item.uuid, options], sort_keys=True)
        fingerprint = self._images.fingerprint if self._images is not None else b""
        return hashlib.sha256(fingerprint + content.digest() + said.encode()).hexdigest()

    def _contents(self, items: Sequence[Item]) -> list[_Content]:
        """What the items hold. URLs are fetched some at a time."""
        if sum(isinstance(item.source, str) for item in items) < 2:
            return [self._content(item) for item in items]
        with ThreadPoolExecutor(_FETCHES, "media-fetch") as threads:
            return list(threads.map(self._content, items))

    def _content(self, item: Item) -> _Content:
        if item.is_embeds:
            with _naming(item):
                return _Content("embeds", arrays=read_embeds(item.modality, item.source, self._limits.max_bytes))
        if item.modality != "image" or self._images is None:
            raise RequestError(
                f"{item.what}: this renderer processes images only, since transformers' other processors need torchvision. "
                f"Give {item.modality}_embeds.",
                item.param,
            )
        source = bytes(item.source) if isinstance(item.source, bytearray | memoryview) else item.source
        if isinstance(source, str | bytes):
            return _Content("file", file=load_bytes(source, self._limits, what=item.what, param=item.param))
        with _naming(item):
            return self._pixels(source)

    def _pixels(self, source: Any) -> _Content:
        image = _image_of_array(source) if isinstance(source, np.ndarray) else source
        if not isinstance(image, Image.Image):
            raise RequestError(f"it must be a URL, bytes of a file, an image of Pillow or an array, not a {type(source).__name__}.")
        width, height = image.size
        if not 0 < width * height <= self._limits.max_pixels:
            raise RequestError(f"it has {width} x {height} pixels; from 1 to {self._limits.max_pixels} are taken (max_media_pixels).")
        try:
            # A copy: an array over Pillow's memory cannot be written to.
            return _Content(f"pixels {image.mode}", pixels=np.array(_opaque(image).convert("RGB"), dtype=np.uint8))
        except Exception as error:  # whatever a decoder raises for a file that the caller has opened
            raise RequestError(f"its pixels cannot be read: {type(error).__name__}.") from error


def _image_of_array(array: np.ndarray) -> Image.Image:
    if array.dtype != np.uint8 or array.ndim not in (2, 3):
        raise RequestError(f"an array must be uint8 [height, width, 3], not {array.dtype} {list(array.shape)}.")
    if array.ndim == 3 and array.shape[2] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = np.moveaxis(array, 0, -1)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if not array.size or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise RequestError(f"an array must be uint8 [height, width, 3], not of the shape {list(array.shape)}.")
    return Image.fromarray(np.ascontiguousarray(array))


def _opaque(image: Image.Image) -> Image.Image:
    """Pillow would warn that RGB has no room for a palette's transparency."""
    return image.convert("RGBA") if "transparency" in image.info else image


@contextmanager
def _naming(item: Item) -> Iterator[None]:
    """Has what is refused begin with the item's name."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{item.what}: {error}", item.param) from error
