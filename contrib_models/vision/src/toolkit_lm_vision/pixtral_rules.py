"""Prompt rules of models with a Pixtral tower: its shape, and placeholders of pictures, which keep
their rows of tokens. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, RequestError, UnsupportedError
from toolkit_lm.model import HFConfig
from toolkit_lm.renderer import MultiModalRules, Replacement

from toolkit_lm_vision.marks import TOKENS, Marks, given_tokens
from toolkit_lm_vision.shape import VisionShape, text_size

if TYPE_CHECKING:
    import numpy as np

KIND = "pixtral"
_DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 1024,
    "patch_size": 16,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
}
_MARKS = {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
"""Names in processor_config.json of the tokens after a row, and defaults."""
_MOST_PATCHES = 2**16
_MOST_BYTES = 2**24


def is_pixtral(hf_config: Mapping[str, Any]) -> bool:
    """Whether the vision tower is Pixtral's."""
    return HFConfig(hf_config).require("vision_config", dict).get("model_type") == KIND


def is_mistral3(hf_config: Mapping[str, Any]) -> bool:
    """Whether the tower's states are normed and merged by squares: in Mistral 3."""
    return hf_config.get("model_type") == "mistral3" or "Mistral3" in str(
        hf_config.get("architectures")
    )


def tower_shape(hf_config: Mapping[str, Any]) -> VisionShape:
    """Shape of the tower; `image_size` is the longest side of usual pictures. Raises
    CheckpointError, and UnsupportedError for another tower."""
    vision: dict[str, Any] = HFConfig(hf_config).require("vision_config", dict)
    kind = vision.get("model_type", KIND)
    if kind != KIND:
        raise UnsupportedError(
            f"config.json: the vision tower must be of model_type {KIND!r}, not {kind!r}."
        )
    stated = {key: value for key, value in vision.items() if value is not None}
    shape = VisionShape.read(
        {"vision_config": {**_DEFAULTS, **stated, "model_type": "siglip_vision_model"}}
    )
    if shape.hidden_size // shape.num_heads % 4:
        raise CheckpointError(
            f"config.json: the size of heads in 'vision_config' must be a multiple of 4, not "
            f"{shape.hidden_size // shape.num_heads}: rows and columns turn pairs of numbers."
        )
    return shape


def merge_size(hf_config: Mapping[str, Any]) -> int:
    """A square of so many patches a side is one token."""
    merge = HFConfig(hf_config).get("spatial_merge_size", int, 2) if is_mistral3(hf_config) else 1
    if not 1 <= merge <= 2**8:
        raise CheckpointError(
            f"config.json: 'spatial_merge_size' must be from 1 to {2**8}, not {merge}."
        )
    return merge


class PixtralRules(MultiModalRules):
    """A picture of any size is rows of image tokens: a token follows each row, and another the last
    one."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self.shape = tower_shape(config.hf_config)
        self.factor = self.shape.patch_size * merge_size(config.hf_config)
        """Pixels of a token's side."""
        text: dict[str, Any] = HFConfig(config.hf_config).require("text_config", dict)
        self.hidden_size = text_size({"hidden_size": 4096, **text})
        stated = _processor_config(config)
        names = [stated.get(name, default) for name, default in _MARKS.items()]
        self.row_end, self.picture_end = map(str, names)
        self.marks = Marks(config, r"\[.*\]|<.*>")

    def placeholder_id(self, modality: str) -> int:
        config = HFConfig(self.config.hf_config)
        token = config.get("image_token_index", int)
        if token is None:
            token = config.get(
                "image_token_id", int, 10 if is_mistral3(self.config.hf_config) else 32_000
            )
        if not 0 <= token < (self.config.vocab_size or token + 1):
            raise CheckpointError(f"config.json: the image token {token} is not in the vocabulary.")
        return token

    def replacement(self, modality: str, data: Mapping[str, np.ndarray]) -> Replacement:
        name = "embeds" if "embeds" in data else "pixel_values"
        needed = {name, *(["image_sizes"] if name == "embeds" else [])}
        if not needed <= set(data) or set(data) - {name, "image_sizes", TOKENS}:
            raise RequestError(
                "an image must have pixel_values, or image_sizes and embeds [rows * columns, "
                f"{self.hidden_size}], and nothing else, not {sorted(data)}."
            )
        array = data[name]
        height, width = self._sides(array if name == "pixel_values" else None, data)
        rows = height // self.factor
        columns = width // self.factor
        shape = (
            (rows * columns, self.hidden_size)
            if name == "embeds"
            else (1, self.shape.num_channels, height, width)
        )
        if array.shape != shape or array.dtype.kind != "f":
            raise RequestError(
                f"{name} of an image of {height} x {width} must be floats of shape {list(shape)}, "
                f"not {array.dtype} of shape {list(array.shape)}."
            )
        if not abs(array.astype("float32", copy=False)).max() < float("inf"):
            raise RequestError(f"{name} of an image must be finite.")
        token = self.placeholder_id(modality)
        ids = given_tokens(data, self.config.vocab_size) or self._ids(rows, columns, token)
        if ids.count(token) != rows * columns:
            raise RequestError(
                f"an image of {rows} x {columns} tokens has {rows * columns} image tokens, not "
                f"{ids.count(token)}."
            )
        mask = [number == token for number in ids]
        return Replacement(ids, None if all(mask) else mask)

    def _sides(self, pixels: np.ndarray | None, data: Mapping[str, np.ndarray]) -> tuple[int, int]:
        """Height and width in pixels."""
        sizes = data.get("image_sizes")
        if sizes is not None and (sizes.size != 2 or sizes.dtype.kind not in "iu"):
            raise RequestError(
                "image_sizes of an image must be two integers, not "
                f"{sizes.dtype} of shape {list(sizes.shape)}."
            )
        if sizes is not None:
            height, width = map(int, sizes.ravel())
        else:
            assert pixels is not None
            height, width = pixels.shape[-2:] if pixels.ndim == 4 else (0, 0)
        if (
            min(height, width) < 1
            or height % self.factor
            or width % self.factor
            or height * width > _MOST_PATCHES * self.shape.patch_size**2
        ):
            raise RequestError(
                f"height and width of an image must be multiples of {self.factor} and give at "
                f"most {_MOST_PATCHES} patches, not {height} x {width}."
            )
        return height, width

    def _ids(self, rows: int, columns: int, token: int) -> list[int]:
        row_end = self.marks.of(self.row_end)
        picture_end = self.marks.of(self.picture_end)
        row = [token] * columns
        return [*(row + row_end) * (rows - 1), *row, *picture_end]


def _processor_config(config: VllmConfig) -> Mapping[str, Any]:
    """Contents of processor_config.json; empty where there is none."""
    path = Path(config.checkpoint.path if config.checkpoint else ".") / "processor_config.json"
    try:
        found = json.loads(path.read_bytes()[:_MOST_BYTES])
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
