"""Prompt rules of Idefics3 and SmolVLM: the shape of their tower, and placeholders of pictures, cut
into rows of tiles. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, RequestError
from toolkit_lm.model import HFConfig
from toolkit_lm.renderer import MultiModalRules, Replacement

from toolkit_lm_vision.marks import TOKENS, Marks, given_tokens
from toolkit_lm_vision.shape import VisionShape, text_size

if TYPE_CHECKING:
    import numpy as np

_DEFAULTS = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
AROUND = "<fake_token_around_image>"
WHOLE = "<global-img>"
_MARKS = rf"{AROUND}|{WHOLE}|<row_\d+_col_\d+>"
_MOST_TILES = 2**10


def tower_shape(hf_config: Mapping[str, Any]) -> VisionShape:
    """Shape of the tower, SigLIP's. Raises CheckpointError."""
    vision: dict[str, Any] = HFConfig(hf_config).require("vision_config", dict)
    stated = {key: value for key, value in vision.items() if value is not None}
    shape = VisionShape.read(
        {"vision_config": {**_DEFAULTS, **stated, "model_type": "siglip_vision_model"}}
    )
    merge = scale_factor(hf_config)
    if merge < 1 or shape.side % merge:
        raise CheckpointError(
            f"config.json: {shape.side} x {shape.side} patches cannot be merged by "
            f"'scale_factor' {merge}."
        )
    return shape


def scale_factor(hf_config: Mapping[str, Any]) -> int:
    """A square of so many patches a side is one token."""
    return HFConfig(hf_config).get("scale_factor", int, 2)


class Idefics3Rules(MultiModalRules):
    """A picture is its tiles, row by row, each after a token of its place, and then the whole of it
    in one tile."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self.shape = tower_shape(config.hf_config)
        self.num_tokens = (self.shape.side // scale_factor(config.hf_config)) ** 2
        """Of a tile."""
        text: dict[str, Any] = HFConfig(config.hf_config).require("text_config", dict)
        self.hidden_size = text_size({"hidden_size": 4096, **text})
        self.marks = Marks(config, _MARKS, ("\n", "\n\n"))

    def placeholder_id(self, modality: str) -> int:
        token = HFConfig(self.config.hf_config).get("image_token_id", int, 128_257)
        if not 0 <= token < (self.config.vocab_size or token + 1):
            raise CheckpointError(f"config.json: the image token {token} is not in the vocabulary.")
        return token

    def replacement(self, modality: str, data: Mapping[str, np.ndarray]) -> Replacement:
        name = "embeds" if "embeds" in data else "pixel_values"
        others = {"rows", "cols", TOKENS, *(["pixel_attention_mask"] if name != "embeds" else [])}
        if name not in data or set(data) - {name, *others}:
            raise RequestError(
                f"an image must have pixel_values or embeds, and may have {sorted(others)}, not "
                f"{sorted(data)}."
            )
        tiles = self._tiles(name, data[name])
        if "pixel_attention_mask" in data and not data["pixel_attention_mask"].all():
            raise RequestError("pixel_attention_mask of an image must be of whole tiles.")
        rows, columns = (self._count(side, data.get(side)) for side in ("rows", "cols"))
        if TOKENS not in data and tiles != rows * columns + 1:
            raise RequestError(
                f"an image of {rows} rows and {columns} columns has {rows * columns + 1} tiles, "
                f"not {tiles}."
            )
        token = self.placeholder_id(modality)
        ids = given_tokens(data, self.config.vocab_size) or self._ids(rows, columns, token)
        if ids.count(token) != tiles * self.num_tokens:
            raise RequestError(
                f"an image of {tiles} tiles has {tiles * self.num_tokens} image tokens, not "
                f"{ids.count(token)}."
            )
        mask = [number == token for number in ids]
        return Replacement(ids, None if all(mask) else mask)

    def _tiles(self, name: str, array: np.ndarray) -> int:
        if name == "embeds":
            tiles = array.shape[0] // self.num_tokens if array.ndim else 0
            shape: tuple[int, ...] = (tiles * self.num_tokens, self.hidden_size)
        else:
            tiles = array.shape[1] if array.ndim > 1 else 0
            shape = (1, tiles, *self.shape.picture)
        if array.shape != shape or not 1 <= tiles <= _MOST_TILES or array.dtype.kind != "f":
            rows = f"{self.num_tokens} x tiles" if name == "embeds" else "1, tiles"
            rest = (self.hidden_size,) if name == "embeds" else self.shape.picture
            raise RequestError(
                f"{name} of an image must be floats of shape [{rows}, "
                f"{', '.join(map(str, rest))}], not {array.dtype} of shape {list(array.shape)}."
            )
        if not abs(array.astype("float32", copy=False)).max() < float("inf"):
            raise RequestError(f"{name} of an image must be finite.")
        return tiles

    def _count(self, name: str, array: np.ndarray | None) -> int:
        """Rows or columns of tiles; 0: the whole picture is one tile."""
        if array is None:
            return 0
        if array.size != 1 or array.dtype.kind not in "iu":
            raise RequestError(
                f"{name} of an image must be one integer, not {array.dtype} of shape "
                f"{list(array.shape)}."
            )
        count = int(array.ravel()[0])
        if not 0 <= count <= _MOST_TILES:
            raise RequestError(f"{name} of an image must be from 0 to {_MOST_TILES}, not {count}.")
        return count

    def _ids(self, rows: int, columns: int, token: int) -> list[int]:
        tile = [token] * self.num_tokens
        ids: list[int] = []
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                ids += [*self.marks.of(AROUND, f"<row_{row}_col_{column}>"), *tile]
            ids += self.marks.of("\n\n" if row == rows else "\n")
        return [*ids, *self.marks.of(AROUND, WHOLE), *tile, *self.marks.of(AROUND)]
