"""Prompt rules of Gemma 4: the shape of its tower, and placeholders of pictures and videos of any
size. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, RequestError, UnsupportedError
from toolkit_lm.model import HFConfig
from toolkit_lm.renderer import MultiModalRules, Replacement

from toolkit_lm_vision.frames import TIME_IDS, TIMES, frame_seconds, frame_texts
from toolkit_lm_vision.internvl_rules import added_token
from toolkit_lm_vision.shape import text_size

if TYPE_CHECKING:
    import numpy as np

_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10 * 1024,
}
_MOST = 2**18
_MOST_PATCHES = 2**16


class PatchNames(NamedTuple):
    """Names of a modality's arrays in transformers."""

    pixels: str
    """Patches [pictures, n, numbers of a patch]."""
    places: str
    """Columns and rows [pictures, n, 2]; -1 for padding."""


NAMES = {
    "image": PatchNames("pixel_values", "image_position_ids"),
    "video": PatchNames("pixel_values_videos", "video_position_ids"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Shape:
    """Shape of a tower that reads patches of pictures, and pools squares of their states."""

    hidden_size: int
    inner_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    pooled: int
    """Patches of a token's side."""
    patch_values: int
    """Numbers of a patch: height, width, channels."""
    num_positions: int
    """Learned positions of rows, and as many of columns."""
    theta: float
    eps: float
    activation: str
    is_clipped: bool
    """Whether linear layers have bounds of what they read and give."""
    is_standardized: bool

    @classmethod
    def read(cls, hf_config: Mapping[str, Any]) -> Gemma4Shape:
        """Reads a config.json with a `vision_config`. Raises CheckpointError, and UnsupportedError
        for values that no published checkpoint has."""
        vision: dict[str, Any] = HFConfig(hf_config).require("vision_config", dict)
        config = HFConfig({**_DEFAULTS, **{k: v for k, v in vision.items() if v is not None}})
        for name in _DEFAULTS:
            if not 1 <= config.require(name, int) <= _MOST:
                raise CheckpointError(
                    f"config.json: {name} of 'vision_config' must be from 1 to {_MOST}, not "
                    f"{config.values[name]}."
                )
        rope = HFConfig(config.get("rope_parameters", dict, {}))
        if rope.get("rope_type", str, "axial") != "axial":
            raise UnsupportedError(
                "config.json: 'rope_type' of 'vision_config' must be 'axial', not "
                f"{rope.values['rope_type']!r}."
            )
        if config.get("attention_bias", bool, False):
            raise UnsupportedError("config.json: 'attention_bias' of 'vision_config' is not read.")
        head_size = config.require("head_dim", int)
        heads = config.require("num_attention_heads", int)
        kv_heads = config.require("num_key_value_heads", int)
        if head_size % 4 or heads % kv_heads:
            raise CheckpointError(
                f"config.json: 'vision_config' describes no vision tower: head_dim={head_size}, "
                f"num_attention_heads={heads}, num_key_value_heads={kv_heads}."
            )
        return cls(
            hidden_size=config.require("hidden_size", int),
            inner_size=config.require("intermediate_size", int),
            num_layers=config.require("num_hidden_layers", int),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=head_size,
            pooled=config.require("pooling_kernel_size", int),
            patch_values=3 * config.require("patch_size", int) ** 2,
            num_positions=config.require("position_embedding_size", int),
            theta=rope.get("rope_theta", float, 100.0),
            eps=config.get("rms_norm_eps", float, 1e-6),
            activation=config.get("hidden_activation", str, "gelu_pytorch_tanh"),
            is_clipped=config.get("use_clipped_linears", bool, False),
            is_standardized=config.get("standardize", bool, False),
        )


class Gemma4Rules(MultiModalRules):
    """A picture stands between two tokens that mark its ends, and is as many tokens as its patches
    have squares that are pooled. In larger models its tokens see each other. Frames of a video are
    pictures after their times; there are none where the tokenizer has no token of videos."""

    bidirectional = True
    modalities: tuple[str, ...] = ("image", "video")
    surround: ClassVar[Mapping[str, tuple[str, str]]] = {"video": ("00:00 ", "")}

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self.shape = Gemma4Shape.read(config.hf_config)
        text: dict[str, Any] = HFConfig(config.hf_config).require("text_config", dict)
        self.hidden_size = text_size({"hidden_size": 2304, **text})
        self._video = added_token(config, "<|video|>")
        if self._video is None:
            self.modalities = ("image",)

    def placeholder_id(self, modality: str) -> int:
        if modality == "video" and self._video is not None:
            return self._video
        return self._token("image", 258_880)

    def _token(self, name: str, default: int) -> int:
        return HFConfig(self.config.hf_config).get(f"{name}_token_id", int, default)

    def texts(self, modality: str, data: Mapping[str, np.ndarray]) -> Mapping[str, Sequence[str]]:
        if modality != "video":
            return {}
        times = frame_seconds(data)
        if times[0] >= 1:
            raise RequestError(f"{TIMES} of a video must begin in the first second.")
        return {TIME_IDS: [f" {int(time) // 60:02d}:{int(time) % 60:02d} " for time in times[1:]]}

    def replacement(self, modality: str, data: Mapping[str, np.ndarray]) -> Replacement:
        names = NAMES[modality]
        values = "embeds" if "embeds" in data else names.pixels
        own = {values} if values == "embeds" else {values, names.places}
        also = {f"num_soft_tokens_per_{modality}"}
        also |= {TIMES, TIME_IDS} if modality == "video" else set()
        if set(data) - also != own:
            raise RequestError(
                f"one {modality} must have {names.pixels} and {names.places}, or embeds, not "
                f"{sorted(data)}."
            )
        pictures = 1 if modality == "image" else len(frame_seconds(data))
        count = self._count(values, data, names, pictures)
        token = self._token(modality, 258_880 if modality == "image" else 258_884)
        begin = self._token("boi", 255_999)
        end = self._token("eoi", 258_882)
        ids = [begin, token, end]
        if not 0 <= min(ids) <= max(ids) < (self.config.vocab_size or max(ids) + 1):
            raise CheckpointError(
                f"config.json: tokens of pictures, {sorted(set(ids))}, are not all in the "
                "vocabulary."
            )
        token_ids: list[int] = []
        mask: list[bool] = []
        for text in [[], *self._between(data, pictures - 1)]:
            token_ids += [*text, begin, *[token] * count, end]
            mask += [*[False] * (len(text) + 1), *[True] * count, False]
        return Replacement(token_ids, mask)

    def _between(self, data: Mapping[str, np.ndarray], count: int) -> list[list[int]]:
        """Tokens of the times between frames."""
        if count == 0:
            return []
        special = {self._token("image", 258_880), self._token("video", 258_884), self._video}
        return frame_texts(data, count, count + 1, special, self.config.vocab_size)

    def _count(
        self, values: str, data: Mapping[str, np.ndarray], names: PatchNames, pictures: int
    ) -> int:
        """Number of tokens of each of so many pictures. Raises RequestError."""
        array = data[values]
        is_embeds = values == "embeds"
        rows = self.hidden_size if is_embeds else self.shape.patch_values
        shape = array.shape if is_embeds else array.shape[1:]
        if (
            len(shape) != 2
            or (not is_embeds and array.shape[0] != pictures)
            or (is_embeds and shape[0] % pictures)
            or shape[1] != rows
            or not 1 <= shape[0] <= _MOST_PATCHES
            or array.dtype.kind != "f"
        ):
            raise RequestError(
                f"{values} must be floats of shape "
                f"{[*([] if is_embeds else [pictures]), 'n', rows]}, not {array.dtype} of shape "
                f"{list(array.shape)}."
            )
        if not abs(array.astype("float32", copy=False)).max() < float("inf"):
            raise RequestError(f"{values} must be finite.")
        if is_embeds:
            return int(shape[0]) // pictures
        places = data[names.places]
        if places.shape != (pictures, shape[0], 2) or places.dtype.kind not in "iu":
            raise RequestError(
                f"{names.places} must be integers of shape {[pictures, shape[0], 2]}, not "
                f"{places.dtype} of shape {list(places.shape)}."
            )
        if not (places == places[0]).all():
            raise RequestError(f"{names.places} of a video's frames must be the same.")
        return self._patches(names.places, places[0]) // self.shape.pooled**2

    def _patches(self, name: str, places: np.ndarray) -> int:
        """Number of patches before the padding, which are all of a picture, row after row."""
        count = int((places[:, 0] >= 0).sum())
        width, height = (int(places[:, axis].max()) + 1 for axis in (0, 1))
        columns = places[:count, 0]
        rows = places[:count, 1]
        if (
            not count
            or count != width * height
            or width % self.shape.pooled
            or height % self.shape.pooled
            or max(width, height) > self.shape.num_positions
            or not (places[count:] == -1).all()
            or [*(rows * width + columns)] != [*range(count)]
        ):
            raise RequestError(
                f"{name} must be columns and rows of a picture's patches, row after "
                f"row, of sides that are multiples of {self.shape.pooled}; then -1."
            )
        return count
