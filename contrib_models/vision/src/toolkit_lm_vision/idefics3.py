"""Idefics3 (Laurençon et al. 2024) and SmolVLM (Marafioti et al. 2025): SigLIP over tiles of a
picture, whose squares of patches are merged, and any language model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.messages import Array
from toolkit_lm.model import HFConfig, ReplicatedLinear, join
from toolkit_lm.parts import EncoderSequences
from toolkit_lm_decoder.composed import ComposedModel, text_config
from torch import Tensor, nn

from toolkit_lm_vision.idefics3_rules import scale_factor, tower_shape
from toolkit_lm_vision.renamed import Renamed
from toolkit_lm_vision.shape import VisionShape, text_size
from toolkit_lm_vision.towers import TowerModel, VisionEmbeddings, VisionTower, merged_squares

_NAMES = (
    (re.compile(r"^model\.text_model\."), "model.language_model."),
    (re.compile(r"^model\.vision_model\."), "model.vision_tower."),
)
"""Names of this family's weights, as other families have them."""
_DEFAULTS: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}


class TileEmbeddings(VisionEmbeddings):
    """Embeddings of a tile's patches, with positions by their share of the tile's sides."""

    def positions(self) -> Tensor:
        weight = self.position_embedding.weight
        # In floats, as in transformers: next to a border, rounding takes the neighbour's position.
        side = round(len(weight) ** 0.5)
        borders = torch.arange(1 / side, 1.0, 1 / side)
        shares = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))
        places = torch.bucketize(shares.clamp(max=1.0 - 1e-6), borders, right=True)
        return weight[(places[:, None] * side + places).flatten().to(weight.device)]


class TileTower(VisionTower):
    embeddings_class = TileEmbeddings


class Projection(nn.Module):
    """The linear layer, under its name in checkpoints."""

    def __init__(self, input_size: int, size: int, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.proj = ReplicatedLinear(
            input_size, size, bias=False, vllm_config=vllm_config, prefix=join(prefix, "proj")
        )


class Connector(nn.Module):
    """States of patches [N, patches, tower's size] -> [N, tokens, H]."""

    def __init__(
        self, shape: VisionShape, merge: int, size: int, *, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        self.merge = merge
        self.modality_projection = Projection(
            shape.hidden_size * merge**2,
            size,
            vllm_config=vllm_config,
            prefix=join(prefix, "modality_projection"),
        )

    def forward(self, states: Tensor) -> Tensor:
        merged = merged_squares(states, self.merge)
        out: Tensor = self.modality_projection.proj(merged.flatten(0, 1))
        return out.view(*merged.shape[:2], -1)


class Idefics3Images(TowerModel):
    """Pixels of each picture's tiles [1, n, channels, S, S] -> its embeddings [n * tokens, H]."""

    tower_class: ClassVar[type[VisionTower]] = TileTower

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        shape = tower_shape(vllm_config.hf_config)
        self.vision_tower = self.tower_class(
            shape,
            [shape.num_layers],
            normed=True,
            vllm_config=vllm_config,
            prefix=join(prefix, "vision_tower"),
        )
        self.connector = Connector(
            shape,
            scale_factor(vllm_config.hf_config),
            text_size(idefics3_text_config(vllm_config.hf_config)),
            vllm_config=vllm_config,
            prefix=join(prefix, "connector"),
        )

    def embeddings(self, pixels: list[Tensor], sequences: EncoderSequences) -> list[Tensor]:
        (states,) = self.vision_tower(torch.cat([tiles[0] for tiles in pixels]), sequences)
        embeds: Tensor = self.connector(states)
        parts = torch.split(embeds, [tiles.shape[1] for tiles in pixels])
        return [part.flatten(0, 1) for part in parts]


def idefics3_text_config(hf_config: Any) -> dict[str, Any]:
    """The config.json of the language part."""
    config = HFConfig(hf_config)
    text = dict(config.require("text_config", dict))
    if text.get("model_type", "llama") == "llama":
        # Published files name a class that is nowhere: VLlama3ForCausalLM.
        text.pop("architectures", None)
    found = text_config({**hf_config, "text_config": text}, _DEFAULTS)
    found["tie_word_embeddings"] = config.get("tie_word_embeddings", bool, False)
    return found


def example_tile(vllm_config: VllmConfig) -> tuple[str, dict[str, Array]]:
    """A black picture of one tile."""
    pixels = np.zeros((1, 1, *tower_shape(vllm_config.hf_config).picture), np.float32)
    return "image", {"pixel_values": Array.of(pixels)}


class Idefics3ForConditionalGeneration(ComposedModel):
    """Idefics3 with its language-modeling head."""

    encoder_class = Idefics3Images

    def text_config(self) -> dict[str, Any]:
        return idefics3_text_config(self.vllm_config.hf_config)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(Renamed(weights, _NAMES))

    def example_items(self) -> list[tuple[str, dict[str, Array]]]:
        return [example_tile(self.vllm_config)]


class SmolVLMForConditionalGeneration(Idefics3ForConditionalGeneration):
    """SmolVLM with its language-modeling head: Idefics3 of small sizes."""
