"""PixtralImages: Pixtral's tower and what projects its states, in LLaVA and in Mistral 3."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import ClassVar

import numpy as np
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.messages import Array
from toolkit_lm.model import Model, join
from toolkit_lm.parts import EncoderSequences
from torch import Tensor

from toolkit_lm_vision.llava_rules import TakenStates
from toolkit_lm_vision.pixtral_rules import merge_size, tower_shape
from toolkit_lm_vision.pixtral_tower import PixtralTower

Grid = tuple[int, int]
"""Rows and columns of a picture's patches."""
_LARGEST_SIDE = 32
"""Tokens of a side of the largest usual picture."""


def example_picture(vllm_config: VllmConfig) -> dict[str, Array]:
    """A usual picture's arrays."""
    shape = tower_shape(vllm_config.hf_config)
    factor = shape.patch_size * merge_size(vllm_config.hf_config)
    most = min(_LARGEST_SIDE, shape.image_size // factor, math.isqrt(vllm_config.max_model_len - 1))
    side = factor * max(1, most)
    return {"pixel_values": Array.of(np.zeros((1, shape.num_channels, side, side), np.float32))}


class PixtralImages(Model):
    """Pixels of pictures [1, channels, height, width] -> embeddings of each [n, H]."""

    packed = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    renames = ((r"^model\.", ""),)
    layer: ClassVar[int] = -2
    """`vision_feature_layer` of a config.json that states none."""
    strategy: ClassVar[str] = "default"
    """And `vision_feature_select_strategy`."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        stated = {
            "vision_feature_layer": self.layer,
            "vision_feature_select_strategy": self.strategy,
            **vllm_config.hf_config,
        }
        self.shape = tower_shape(stated)
        taken = TakenStates.read(stated, self.shape)
        if taken.first:
            raise UnsupportedError(
                "config.json: 'vision_feature_select_strategy' must be 'full' for a Pixtral tower: "
                "no state stands before those of its patches."
            )
        self.merge = merge_size(stated)
        self.layers = taken.layers
        self.vision_tower = PixtralTower(
            self.shape,
            taken.layers,
            vllm_config=vllm_config,
            prefix=join(prefix, "vision_tower"),
        )

    def projected(self, states: Tensor, grids: list[Grid]) -> Tensor:
        """States of all patches -> embeddings of all tokens."""
        raise NotImplementedError

    def embeddings(self, pixels: list[Tensor], sequences: EncoderSequences) -> list[Tensor]:
        patch = self.shape.patch_size
        grids = [(image.shape[2] // patch, image.shape[3] // patch) for image in pixels]
        embeds = self.projected(self.vision_tower(pixels, sequences), grids)
        counts = [rows * columns // self.merge**2 for rows, columns in grids]
        return list(torch.split(embeds, counts))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        first = len(self.vision_tower.transformer.layers)
        layer = re.compile(r"^(?:model\.)?vision_tower\.transformer\.layers\.(\d+)\.")
        return super().load_weights(
            (name, tensor)
            for name, tensor in weights
            if not ((found := layer.match(name)) and first <= int(found[1]) < self.shape.num_layers)
        )
