"""Bounds on the memory that media takes, known before an item is decoded. They come from file
headers and the checkpoint's JSON, without transformers."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from toolkit_lm_media.data_url import beginning
from toolkit_lm_media.image import image_size

from toolkit_lm_renderer_hf.audio_processor import Window
from toolkit_lm_renderer_hf.image_processor import QWEN
from toolkit_lm_renderer_hf.media_items import Item
from toolkit_lm_renderer_hf.tokenizer import read_json

_MADE = 3 * 4
_READ = 3
"""Bytes of a pixel: of what is made of it, and while it is read."""
_BEGINNING = 3 * 2**15
"""Bytes at the start of a file that are searched for its header. A JPEG file's size may come later,
after the camera's metadata."""
_QWEN = {
    "shortest_edge": 56 * 56,
    "longest_edge": 28 * 28 * 1280,
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
"""Defaults of transformers' Qwen2VLImageProcessor."""
_GLM = {**_QWEN, "shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}
"""Defaults of transformers' Glm4vImageProcessor, which counts the pixels of a picture's two frames.
"""
_PATCHED = (
    (QWEN, _QWEN),
    (re.compile("Glm(4|46)[vV]ImageProcessor(Fast|Pil)?"), _GLM),
)
"""Names of processors whose pictures keep their size, and defaults."""
_LONGEST = re.compile("(Idefics3|SmolVLM|Pixtral)ImageProcessor(Fast|Pil)?")
"""Names of processors that bound the longer side."""
_PATCH = 64
"""Pixels of a patch's side, or more."""


class MediaSizes:
    """Bounds for one checkpoint. What it cannot tell counts as the most that the operator lets
    in."""

    def __init__(
        self, folder: Path, max_pixels: int, max_tokens: int, modalities: Container[str]
    ) -> None:
        """`max_pixels`: of an image, or of a video's frames. `max_tokens`: of all items of a
        prompt. `modalities`: those that are read."""
        self._modalities = modalities
        self._max_pixels = max_pixels
        self._window = Window.read(folder) if "audio" in modalities else None
        nested = read_json(folder / "processor_config.json").get("image_processor")
        stated = (
            nested
            if isinstance(nested, Mapping)
            else read_json(folder / "preprocessor_config.json")
        )
        kind = str(stated.get("image_processor_type"))
        defaults = next((own for names, own in _PATCHED if names.fullmatch(kind)), {})
        self._is_patched = bool(defaults)
        size = stated.get("size")
        edges: Mapping[str, Any] = size if isinstance(size, Mapping) else {}
        if self._is_patched:
            numbers = {
                "shortest_edge": stated.get("min_pixels"),
                "longest_edge": stated.get("max_pixels"),
                **edges,
            }
            found = {
                name: self._number(stated.get(name) or numbers.get(name) or default)
                for name, default in defaults.items()
            }
            self._depth = found["temporal_patch_size"]
            self._most_of_prompt = max_tokens * (found["patch_size"] * found["merge_size"]) ** 2
            self._least = found["shortest_edge"]
            self._most = found["longest_edge"]
        else:
            crop = stated.get("crop_size")
            if stated.get("do_center_crop") is not False and crop is not None:
                edges = crop if isinstance(crop, Mapping) else {"height": crop, "width": crop}
            self._depth = 1
            self._most_of_prompt = max_pixels
            height, width = (edges.get(name) for name in ("height", "width"))
            most = self._number(height) * self._number(width)
            if _LONGEST.fullmatch(kind) and not height:
                most = self._tiled(self._number(edges.get("longest_edge")), stated)
            self._least = self._most = min(most, max_pixels)

    def bytes_of(self, item: Item, options: Mapping[str, Any]) -> tuple[int, int]:
        """Upper bounds in bytes: of the arrays an item becomes, and of the extra memory while it is
        read. `options`: processor options from the request."""
        if item.source is None or item.is_embeds or item.modality not in self._modalities:
            return 0, 0
        if self._window is not None and item.modality == "audio":
            return self._window.made, self._window.read_bytes
        if item.modality == "video":
            # A frame is small beside what is made of all of them.
            return _MADE * min(self._max_pixels, self._most_of_prompt * self._depth), 0
        pixels = min(_pixels(item.source) or self._max_pixels, self._max_pixels)
        most = min(self._most, self._most_of_prompt)
        if self._is_patched:
            size = options.get("size")
            chosen = options.get("max_pixels") or (
                size.get("longest_edge") if isinstance(size, Mapping) else None
            )
            most = min(most, self._number(chosen))
        return _MADE * self._depth * min(max(pixels, self._least), most), _READ * pixels

    def _tiled(self, longest: int, stated: Mapping[str, Any]) -> int:
        """Most pixels of a picture whose longer side is bounded: both sides grow to whole tiles, or
        patches."""
        tile = stated.get("max_image_size")
        if not isinstance(tile, Mapping):
            return (longest + _PATCH) ** 2
        step = self._number(tile.get("longest_edge"))
        # One more tile holds the picture as a whole. The mask has 8 bytes of each pixel.
        return ((math.ceil(longest / step) * step) ** 2 + step**2) * (_MADE + 8) // _MADE

    def _number(self, value: Any) -> int:
        return value if type(value) is int and 0 < value < self._max_pixels else self._max_pixels


def _pixels(source: Any) -> int | None:
    """Number of pixels of a picture; 0 for a file or URL whose beginning does not state its size,
    None for other sources."""
    if isinstance(source, str):
        source = beginning(source, _BEGINNING)
    if isinstance(source, bytes | bytearray | memoryview):
        width, height = image_size(bytes(source[:_BEGINNING])) or (0, 0)
        return width * height
    size = getattr(source, "size", None)
    # Sizes of a Pillow image, and of an array.
    if isinstance(size, tuple) and len(size) == 2:
        return int(size[0] * size[1])
    return size if isinstance(size, int) else None
