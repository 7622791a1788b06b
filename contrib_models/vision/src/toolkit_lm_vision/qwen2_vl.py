"""Qwen2-VL and Qwen2.5-VL: pictures and videos of any size with text. Tokens have positions in
time, height and width."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.messages import Array, MultiModalFeatureSpec
from toolkit_lm.model import HFConfig, Model, join
from toolkit_lm.parts import EncoderSequences
from toolkit_lm_decoder.composed import ComposedModel
from torch import Tensor

from toolkit_lm_vision.frames import TIME_IDS, TIMES
from toolkit_lm_vision.qwen2_vl_rules import SECONDS, Names
from toolkit_lm_vision.qwen2_vl_shape import Grid, PatchShape
from toolkit_lm_vision.qwen2_vl_tower import PatchTower
from toolkit_lm_vision.renamed import Renamed

_LARGEST_SIDE = 32
"""Tokens of a side of the largest usual picture: 896 x 896 pixels."""
_OLDER = (
    (re.compile(r"^visual\."), "model.visual."),
    (re.compile(r"^model\.(?!visual\.|language_model\.)"), "model.language_model."),
)
"""How files name weights, which transformers 5 has in a model of their own."""


class Qwen2VLImages(Model):
    """Patches of items -> embeddings of each [n, H]."""

    packed = {"gate_up_proj": ("gate_proj", "up_proj")}
    renames = ((r"^model\.", ""),)
    kind: ClassVar[str] = "qwen2_vl"
    """Kind of the tower, as in PatchShape."""
    tower: ClassVar[type[PatchTower]] = PatchTower

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.shape = PatchShape.read(vllm_config.hf_config, self.kind)
        self.visual = self.tower(self.shape, vllm_config=vllm_config, prefix=join(prefix, "visual"))

    def forward(  # type: ignore[override]
        self, patches: list[Tensor], grids: list[Grid], sequences: EncoderSequences
    ) -> list[Tensor]:
        embeds: Tensor = self.visual(torch.cat(patches), grids, sequences)
        return list(torch.split(embeds, [self.shape.num_tokens(grid) for grid in grids]))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights((name, _flat(name, tensor)) for name, tensor in weights)


def _flat(name: str, tensor: Tensor) -> Tensor:
    """The weight of a convolution over patches, as that of a linear layer."""
    return (
        tensor.flatten(1)
        if name.endswith("patch_embed.proj.weight") and tensor.ndim > 1
        else tensor
    )


class Qwen25VLImages(Qwen2VLImages):
    kind = "qwen2_5_vl"


class Qwen2VLForConditionalGeneration(ComposedModel):
    """Qwen2-VL with its language-modeling head."""

    encoder_class: ClassVar[type[Qwen2VLImages]] = Qwen2VLImages
    language_name = ""
    modalities: ClassVar[tuple[str, ...]] = ("image", "video")
    tells_times: ClassVar[bool] = False
    """Whether the frames of a video stand after their times."""
    language: ClassVar[Mapping[str, Any]] = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
    }
    """Values in the config.json of the language part, whatever the checkpoint's are."""
    defaults = {"rope_theta": 1e6}
    rope_defaults: ClassVar[Mapping[str, Any]] = {"mrope_section": [16, 24, 24]}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.shape = PatchShape.read(vllm_config.hf_config, self.encoder_class.kind)

    def text_config(self) -> dict[str, Any]:
        config = HFConfig(self.vllm_config.hf_config)
        # Until transformers 5 it stood among the values of the whole.
        text_config = config.get("text_config", dict) or {
            key: value for key, value in config.values.items() if key != "vision_config"
        }
        tied = any(
            HFConfig(part).get("tie_word_embeddings", bool, False)
            for part in (config.values, text_config)
        )
        found = {**self.defaults, **text_config, **self.language, "tie_word_embeddings": tied}
        rope = HFConfig(found).get("rope_parameters", dict) or HFConfig(found).get(
            "rope_scaling", dict, {}
        )
        return {
            **found,
            "rope_parameters": {**self.rope_defaults, **rope},
            "rope_scaling": None,
        }

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(Renamed(weights, _OLDER))

    def encode_items(
        self, modality: str, items: list[dict[str, Tensor]], sequences: EncoderSequences
    ) -> list[Tensor]:
        names = Names(modality)
        grids = [Grid(*item[names.grid].flatten().tolist()) for item in items]
        embeds: list[Tensor] = self.encoder(
            [item[names.pixels] for item in items], grids, sequences
        )
        return embeds

    def prompt_positions(
        self, token_ids: np.ndarray, features: Sequence[MultiModalFeatureSpec]
    ) -> np.ndarray:
        shape = self.shape
        found = []
        start = 0
        end = 0
        for feature in features:
            seconds = feature.layout.get(SECONDS, [None])[0]
            for offset, grid in self._blocks(feature):
                text = offset - end
                found += [
                    _alike(start, text),
                    shape.positions(grid, shape.interval(seconds)) + start + text,
                ]
                # transformers does the same: text after a video does not wait for its last frame.
                start += text + max(grid.h, grid.w) // shape.merge
                end = offset + shape.num_tokens(grid)
        return np.concatenate([*found, _alike(start, len(token_ids) - end)], axis=1)

    def _blocks(self, feature: MultiModalFeatureSpec) -> list[tuple[int, Grid]]:
        """Places and grids of an item's tokens: all together, or each frame between texts."""
        at = feature.mm_position
        grid = Grid(*map(int, feature.layout["grid_thw"]))
        if at.mask is None:
            return [(at.offset, grid)]
        starts = [
            place
            for place, (before, inside) in enumerate(pairwise([False, *at.mask]))
            if inside and not before
        ]
        return [(at.offset + place, Grid(1, grid.h, grid.w)) for place in starts]

    def example_items(self) -> list[tuple[str, dict[str, Array]]]:
        shape = self.shape
        side = shape.merge * max(
            1, min(_LARGEST_SIDE, math.isqrt(max(self.vllm_config.max_model_len - 4, 1)))
        )
        pixels = Array.of(np.zeros((side**2, shape.patch_values), np.float32))
        grid = Array.of(np.array([1, side, side]))
        arrays = {
            modality: {Names(modality).pixels: pixels, Names(modality).grid: grid}
            for modality in self.modalities
        }
        if self.tells_times:
            token_ids = Array.of(np.zeros((1, 1), np.int64))
            arrays["video"] |= {TIMES: Array.of(np.zeros(1)), TIME_IDS: token_ids}
        return list(arrays.items())


def _alike(start: int, length: int) -> np.ndarray:
    """Positions [3, length] of text."""
    return np.tile(np.arange(start, start + length, dtype=np.int64), (3, 1))


# The class name in config.json.
class Qwen2_5_VLForConditionalGeneration(  # noqa: N801
    Qwen2VLForConditionalGeneration
):
    """Qwen2.5-VL with its language-modeling head."""

    encoder_class = Qwen25VLImages
