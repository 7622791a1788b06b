"""Prompt rules of LLaVA-NeXT and LLaVA-OneVision: pictures that are cut into tiles. Imports no
torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, RequestError
from toolkit_lm.model import HFConfig
from toolkit_lm.renderer import MultiModalRules, Replacement

from toolkit_lm_vision.internvl_rules import lacks_token
from toolkit_lm_vision.llava_rules import TakenStates
from toolkit_lm_vision.shape import VisionShape, text_size

if TYPE_CHECKING:
    import numpy as np

_MOST_SIDE = 2**16
_SIDES = range(384, 2305, 384)
NEXT: dict[str, Any] = {
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
}
ONEVISION: dict[str, Any] = {
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "image_token_index": 151646,
    "vision_aspect_ratio": "anyres_max_9",
    "image_grid_pinpoints": [[height, width] for height in _SIDES for width in _SIDES],
}
"""Defaults of transformers, which a config.json may leave out."""


class Tiling(NamedTuple):
    """How a picture's states lie in those of its tiles."""

    rows: int
    columns: int
    """Of tiles."""
    top: int
    left: int
    """Rows and columns of states that are padding, on both sides."""
    height: int
    width: int
    """Of the states that are taken, after scaling."""
    is_scaled: bool

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the tiles. A token more ends each row."""
        return self.height * (self.width + 1)


class AnyresShape(NamedTuple):
    """Tiles, as config.json states them."""

    tower: VisionShape
    taken: TakenStates
    sizes: Sequence[tuple[int, int]]
    """Heights and widths, in pixels, that a picture may be resized to."""
    most: int | None
    """Tiles whose states are taken without scaling; None: any number."""

    @classmethod
    def read(cls, hf_config: Mapping[str, Any], defaults: Mapping[str, Any]) -> AnyresShape:
        """Raises CheckpointError."""
        found = {**defaults, **{k: v for k, v in hf_config.items() if v is not None}}
        tower = VisionShape.read(found)
        taken = TakenStates.read(found, tower)
        sizes = HFConfig(found).require("image_grid_pinpoints", list)
        side = tower.image_size
        for size in sizes:
            if (
                not isinstance(size, list | tuple)
                or len(size) != 2
                or any(type(n) is not int or n % side or not 0 < n <= _MOST_SIDE for n in size)
            ):
                raise CheckpointError(
                    f"config.json: 'image_grid_pinpoints' must be multiples of {side} (the tower's "
                    f"pictures), not {size!r:.50}."
                )
        if not sizes or tower.num_states - taken.first != tower.num_patches:
            raise CheckpointError(
                "config.json: tiles need 'image_grid_pinpoints', and a state of each patch: "
                "'vision_feature_select_strategy' must be 'default' with CLIP, 'full' with SigLIP."
            )
        ratio = HFConfig(found).get("vision_aspect_ratio", str, "")
        most = ratio.removeprefix("anyres_max_")
        if ratio and not most.isdecimal():
            raise CheckpointError(
                f"config.json: 'vision_aspect_ratio' must be like 'anyres_max_9', not {ratio!r}."
            )
        return cls(tower, taken, [tuple(size) for size in sizes], int(most) if most else None)

    @property
    def pooled_side(self) -> int:
        """Tokens of a frame's side, half as many as patches."""
        return -(-self.tower.side // 2)

    def tiling(self, height: int, width: int) -> Tiling:
        """The tiling of a picture of so many pixels."""
        best = max(self.sizes, key=lambda size: _worth(height, width, size))
        rows, columns = (edge // self.tower.image_size for edge in best)
        high = rows * self.tower.side
        wide = columns * self.tower.side
        top = left = 0
        if width / height > wide / high:
            top = (high - int(round(height * (wide / width), 7))) // 2
        else:
            left = (wide - int(round(width * (high / height), 7))) // 2
        high -= 2 * top
        wide -= 2 * left
        ratio = sqrt(high * wide / (self.most * self.tower.num_patches)) if self.most else 1.0
        is_scaled = ratio > 1.1
        if is_scaled:
            high = int(high // ratio)
            wide = int(wide // ratio)
        return Tiling(rows, columns, top, left, high, wide, is_scaled)


def _worth(height: int, width: int, size: tuple[int, int]) -> tuple[int, int]:
    """Pixels of a picture that are kept in this size, and those of it that are not wasted."""
    scale = min(size[1] / width, size[0] / height)
    kept = min(int(width * scale) * int(height * scale), width * height)
    return kept, kept - size[0] * size[1]


class AnyresRules(MultiModalRules):
    """A picture is the tokens of its whole, then those of its tiles, each row with one more."""

    defaults: ClassVar[Mapping[str, Any]] = NEXT

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self.shape = AnyresShape.read(config.hf_config, self.defaults)
        text: dict[str, Any] = HFConfig(config.hf_config).require("text_config", dict)
        self.hidden_size = text_size({"hidden_size": 4096, **text})

    def placeholder_id(self, modality: str) -> int:
        config = HFConfig({**self.defaults, **self.config.hf_config})
        stated = config.get("image_token_index", int)
        token = stated if stated is not None else config.get("image_token_id", int, 32000)
        if not 0 <= token < (self.config.vocab_size or token + 1):
            raise CheckpointError(f"config.json: the image token {token} is not in the vocabulary.")
        return token

    def replacement(self, modality: str, data: Mapping[str, np.ndarray]) -> Replacement:
        name = "embeds" if "embeds" in data else "pixel_values"
        if set(data) - {"batch_num_images"} != {name, "image_sizes"}:
            raise RequestError(
                f"an image must have image_sizes, and pixel_values or embeds, not {sorted(data)}."
            )
        sizes = data["image_sizes"]
        if sizes.size != 2 or sizes.dtype.kind not in "iu" or sizes.min() < 1:
            raise RequestError(
                "image_sizes must be the height and width of the image, not "
                f"{sizes.ravel().tolist()[:4]}."
            )
        if sizes.max() > _MOST_SIDE:
            raise RequestError(f"image_sizes must be {_MOST_SIDE} at most, not {sizes.max()}.")
        tiling = self.shape.tiling(*sizes.ravel().tolist())
        count = self.shape.tower.num_patches + tiling.num_tokens
        shape = (
            (count, self.hidden_size)
            if name == "embeds"
            else (1, tiling.rows * tiling.columns + 1, *self.shape.tower.picture)
        )
        array = data[name]
        if array.shape != shape or array.dtype.kind != "f":
            raise RequestError(
                f"{name} of an image must be floats of shape {list(shape)}, not {array.dtype} of "
                f"shape {list(array.shape)}."
            )
        if not abs(array.astype("float32", copy=False)).max() < float("inf"):
            raise RequestError(f"{name} of an image must be finite.")
        return Replacement([self.placeholder_id(modality)] * count)


class OneVisionRules(AnyresRules):
    """Rules of LLaVA-NeXT, but of many tiles fewer states are taken. A video is the pooled states
    of its frames, and one token more. There are none where the tokenizer has no token of them."""

    defaults = ONEVISION
    modalities: tuple[str, ...] = ("image", "video")

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        if lacks_token(config, self.placeholder_id("video")):
            self.modalities = ("image",)

    def placeholder_id(self, modality: str) -> int:
        if modality != "video":
            return super().placeholder_id(modality)
        config = HFConfig(self.config.hf_config)
        stated = config.get("video_token_index", int)
        token = stated if stated is not None else config.get("video_token_id", int, 151647)
        if not 0 <= token < (self.config.vocab_size or token + 1):
            raise CheckpointError(f"config.json: the video token {token} is not in the vocabulary.")
        return token

    def replacement(self, modality: str, data: Mapping[str, np.ndarray]) -> Replacement:
        if modality != "video":
            return super().replacement(modality, data)
        if len(data) != 1 or next(iter(data)) not in ("pixel_values_videos", "embeds"):
            raise RequestError(
                "a video must have pixel_values_videos, or embeds, and nothing else, not "
                f"{sorted(data)}."
            )
        ((name, array),) = data.items()
        size = self.shape.pooled_side**2
        tail = (self.hidden_size,) if name == "embeds" else self.shape.tower.picture
        rows = len(array) if array.ndim else 0
        count = rows - 1 if name == "embeds" else rows * size
        if (
            array.shape[1:] != tail
            or array.dtype.kind != "f"
            or not 0 < count <= _MOST_SIDE * size
            or count % size
        ):
            some = f"a multiple of {size}, and 1" if name == "embeds" else "n"
            raise RequestError(
                f"{name} of a video must be floats of shape {[some, *tail]}, not {array.dtype} of "
                f"shape {list(array.shape)}."
            )
        if not abs(array.astype("float32", copy=False)).max() < float("inf"):
            raise RequestError(f"{name} of a video must be finite.")
        return Replacement([self.placeholder_id(modality)] * (count + 1))
