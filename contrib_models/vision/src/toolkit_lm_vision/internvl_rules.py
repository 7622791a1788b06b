"""Prompt rules of InternVL: the shape of its tower, and placeholders of pictures, which may be cut
into tiles. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
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
    """A picture, of one tile or several, stands between `<img>` and `</img>`."""

    surround: ClassVar[Mapping[str, tuple[str, str]]] = {"image": ("<img>", "</img>")}

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self.shape = tower_shape(config.hf_config)
        self.num_tokens = (self.shape.side // squeeze(config.hf_config)) ** 2
        """Of a tile."""
        text: dict[str, Any] = HFConfig(config.hf_config).require("text_config", dict)
        self.hidden_size = text_size({"hidden_size": 4096, **text})

    def placeholder_id(self, modality: str) -> int:
        token = HFConfig(self.config.hf_config).get("image_token_id", int, 151667)
        if not 0 <= token < (self.config.vocab_size or token + 1):
            raise CheckpointError(f"config.json: the image token {token} is not in the vocabulary.")
        return token

    def replacement(self, modality: str, data: Mapping[str, np.ndarray]) -> Replacement:
        name = "embeds" if "embeds" in data else "pixel_values"
        if name not in data or set(data) - {name, "num_patches"}:
            raise RequestError(
                f"an image must have pixel_values or embeds, and may have num_patches, not "
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
                f"{name} of an image must be floats of shape [{rows} x tiles, "
                f"{', '.join(map(str, per_tile))}], not {array.dtype} of shape {list(array.shape)}."
            )
        if not abs(array.astype("float32", copy=False)).max() < float("inf"):
            raise RequestError(f"{name} of an image must be finite.")
        if "num_patches" in data and data["num_patches"].ravel().tolist() != [tiles]:
            raise RequestError(
                f"num_patches of an image of {tiles} tiles must be [{tiles}], not "
                f"{data['num_patches'].tolist()}."
            )
        return Replacement([self.placeholder_id(modality)] * (tiles * self.num_tokens))
