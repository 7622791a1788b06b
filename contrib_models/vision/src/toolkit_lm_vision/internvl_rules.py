"""Prompt rules of InternVL: the shape of its tower, and placeholders of pictures, which may be cut
into tiles, and of videos, whose frames are tiles. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, RequestError, UnsupportedError
from toolkit_lm.model import HFConfig
from toolkit_lm.renderer import MultiModalRules, Replacement

from toolkit_lm_vision.shape import VisionShape, text_size

if TYPE_CHECKING:
    import numpy as np

_DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
}
_MOST_TILES = 2**10
_FRAME_IDS = "frame_ids"
"""Name of the array [frames - 1, longest] of tokens between a video's frames."""


def tower_shape(hf_config: Mapping[str, Any]) -> VisionShape:
    """Shape of the tower, which has a state of the whole picture, as CLIP's. Raises
    CheckpointError, and UnsupportedError for values that no published checkpoint has."""
    config = HFConfig(hf_config)
    vision: dict[str, Any] = {**_DEFAULTS, **config.require("vision_config", dict)}
    for name in ("image_size", "patch_size"):
        sides = vision[name] if isinstance(vision[name], list) else [vision[name]]
        if len(set(map(str, sides))) != 1:
            raise UnsupportedError(f"config.json: {name} {sides} of 'vision_config' is no square.")
        vision[name] = sides[0]
    for key, usual in {
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    }.items():
        if (found := config.values.get(key, usual)) != usual:
            raise UnsupportedError(f"config.json: {key!r} must be {usual!r}, not {found!r}.")
    shape = VisionShape.read({"vision_config": {**vision, "model_type": "clip_vision_model"}})
    if shape.side % squeeze(hf_config):
        raise CheckpointError(
            f"config.json: {shape.side} x {shape.side} patches cannot be merged by "
            f"'downsample_ratio' {config.values.get('downsample_ratio')}."
        )
    return shape


def squeeze(hf_config: Mapping[str, Any]) -> int:
    """A square of so many patches a side is one token: 1 / `downsample_ratio`."""
    ratio = HFConfig(hf_config).get("downsample_ratio", float, 0.5)
    count = round(1 / ratio) if 2**-10 < ratio <= 1 else 0
    if not count or abs(count * ratio - 1) > 1e-6:
        raise CheckpointError(
            f"config.json: 'downsample_ratio' must be 1, 1/2, 1/3 and so on, not {ratio}."
        )
    return count


class InternVLRules(MultiModalRules):
    """A picture, of one tile or several, stands between `<img>` and `</img>`; so does each frame of
    a video, after its number. There are no videos where the tokenizer has no token of them."""

    modalities: tuple[str, ...] = ("image", "video")
    surround: ClassVar[Mapping[str, tuple[str, str]]] = {
        "image": ("<img>", "</img>"),
        "video": ("Frame1: <img>", "</img>"),
    }

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self.shape = tower_shape(config.hf_config)
        self.num_tokens = (self.shape.side // squeeze(config.hf_config)) ** 2
        """Of a tile."""
        text: dict[str, Any] = HFConfig(config.hf_config).require("text_config", dict)
        self.hidden_size = text_size({"hidden_size": 4096, **text})
        self._video = added_token(config, "<video>")
        if self._video is None:
            self.modalities = ("image",)

    def placeholder_id(self, modality: str) -> int:
        if modality == "video" and self._video is not None:
            return self._video
        token = HFConfig(self.config.hf_config).get("image_token_id", int, 151667)
        if not 0 <= token < (self.config.vocab_size or token + 1):
            raise CheckpointError(f"config.json: the image token {token} is not in the vocabulary.")
        return token

    def texts(self, modality: str, data: Mapping[str, np.ndarray]) -> Mapping[str, Sequence[str]]:
        if modality != "video":
            return {}
        numbers = range(2, self._tiles(modality, data) + 1)
        return {_FRAME_IDS: [f"</img>\nFrame{number}: <img>" for number in numbers]}

    def replacement(self, modality: str, data: Mapping[str, np.ndarray]) -> Replacement:
        tiles = self._tiles(modality, data)
        tile = [self.placeholder_id("image")] * self.num_tokens
        if modality != "video":
            return Replacement(tile * tiles)
        token_ids = [*tile]
        mask = [True] * len(tile)
        for text in self._between(data.get(_FRAME_IDS), tiles):
            token_ids += [*text, *tile]
            mask += [*[False] * len(text), *[True] * len(tile)]
        return Replacement(token_ids, mask)

    def _tiles(self, modality: str, data: Mapping[str, np.ndarray]) -> int:
        """Number of an item's tiles. Raises RequestError."""
        pixels, also = (
            ("pixel_values_videos", _FRAME_IDS)
            if modality == "video"
            else ("pixel_values", "num_patches")
        )
        name = "embeds" if "embeds" in data else pixels
        if name not in data or set(data) - {name, also}:
            raise RequestError(
                f"one {modality} must have {pixels} or embeds, and may have {also}, not "
                f"{sorted(data)}."
            )
        array = data[name]
        rows = self.num_tokens if name == "embeds" else 1
        per_tile = (self.hidden_size,) if name == "embeds" else self.shape.picture
        tiles = array.shape[0] // rows if array.ndim else 0
        if (
            array.shape != (tiles * rows, *per_tile)
            or not 1 <= tiles <= _MOST_TILES
            or array.dtype.kind != "f"
        ):
            raise RequestError(
                f"{name} of one {modality} must be floats of shape [{rows} x tiles, "
                f"{', '.join(map(str, per_tile))}], not {array.dtype} of shape {list(array.shape)}."
            )
        if not abs(array.astype("float32", copy=False)).max() < float("inf"):
            raise RequestError(f"{name} of one {modality} must be finite.")
        if "num_patches" in data and data["num_patches"].ravel().tolist() != [tiles]:
            raise RequestError(
                f"num_patches of an image of {tiles} tiles must be [{tiles}], not "
                f"{data['num_patches'].tolist()}."
            )
        return tiles

    def _between(self, array: np.ndarray | None, frames: int) -> list[list[int]]:
        """Tokens of the texts between frames."""
        if (
            array is None
            or array.ndim != 2
            or len(array) != frames - 1
            or array.dtype.kind not in "iu"
        ):
            raise RequestError(f"one video of {frames} frames must have {frames - 1} {_FRAME_IDS}.")
        rows = [[token for token in row if token >= 0] for row in array.tolist()]
        most = self.config.vocab_size
        special = {self.placeholder_id(modality) for modality in self.modalities}
        if any(token in special or (most and token >= most) for row in rows for token in row):
            raise RequestError(f"{_FRAME_IDS} must be tokens of text.")
        return rows


def added_token(config: VllmConfig, text: str) -> int | None:
    """Id of a token that the tokenizer alone knows. None: there is none."""
    return next((token for token, content in _added_tokens(config) if content == text), None)


def highest_added_token(config: VllmConfig) -> int | None:
    """Highest id of the tokenizer's added tokens. None: there is none, or no tokenizer."""
    return max((token for token, _ in _added_tokens(config)), default=None)


def lacks_token(config: VllmConfig, token: int) -> bool:
    """Whether there is a tokenizer, and it has no added token of this id."""
    added = _added_tokens(config)
    return bool(added) and all(number != token for number, _ in added)


def _added_tokens(config: VllmConfig) -> list[tuple[int, str]]:
    """Ids and texts of the tokenizer's added tokens; none where there is no file of it."""
    if config.checkpoint is None:
        return []
    folder = Path(config.renderer.tokenizer or config.checkpoint.path)
    tokens: list[tuple[int, str]] = []
    for name in ("tokenizer_config.json", "tokenizer.json"):
        try:
            found = json.loads((folder / name).read_text("utf-8"))
        except (OSError, ValueError):
            continue
        decoder = found.get("added_tokens_decoder") or {}
        listed = found.get("added_tokens", ())
        added = [*decoder.items(), *((values.get("id"), values) for values in listed)]
        tokens += [(int(number), str(values.get("content"))) for number, values in added]
    return tokens
