"""InternVL 3 and 3.5: a tower of tiles, whose squares of patches are merged and projected, and any
language model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.messages import Array
from toolkit_lm.model import (
    ColumnParallelLinear,
    HFConfig,
    LayerNorm,
    Model,
    RowParallelLinear,
    join,
    torch_dtype,
)
from toolkit_lm.parts import EncoderSequences
from toolkit_lm_decoder.composed import ComposedModel, text_config
from torch import Tensor, nn

from toolkit_lm_vision.internvl_rules import squeeze, tower_shape
from toolkit_lm_vision.internvl_tower import InternVLTower
from toolkit_lm_vision.shape import text_size
from toolkit_lm_vision.towers import merged_squares


class InternVLProjector(nn.Module):
    """Merged states [T, tower's size * merged patches] -> [T, H]."""

    def __init__(self, input_size: int, size: int, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.layer_norm = LayerNorm(
            input_size, eps=1e-5, dtype=torch_dtype(vllm_config.model.dtype)
        )
        self.linear_1 = ColumnParallelLinear(
            input_size,
            size,
            bias=True,
            activation=HFConfig(vllm_config.hf_config).get("projector_hidden_act", str, "gelu"),
            vllm_config=vllm_config,
            prefix=join(prefix, "linear_1"),
        )
        self.linear_2 = RowParallelLinear(
            size, size, bias=True, vllm_config=vllm_config, prefix=join(prefix, "linear_2")
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear_2(self.linear_1(self.layer_norm(x)))
        return out


class InternVLImages(Model):
    """Pixels of each picture's tiles [n, channels, S, S] -> its embeddings [n * tokens, H]."""

    packed = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
    renames = ((r"^model\.", ""),)
    ignored = (r"embeddings\.mask_token$",)

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        shape = tower_shape(vllm_config.hf_config)
        self.squeeze = squeeze(vllm_config.hf_config)
        self.vision_tower = InternVLTower(
            shape, vllm_config=vllm_config, prefix=join(prefix, "vision_tower")
        )
        self.multi_modal_projector = InternVLProjector(
            shape.hidden_size * self.squeeze**2,
            text_size(internvl_text_config(vllm_config.hf_config)),
            vllm_config=vllm_config,
            prefix=join(prefix, "multi_modal_projector"),
        )

    def embeddings(self, pixels: list[Tensor], sequences: EncoderSequences) -> list[Tensor]:
        states = self.vision_tower(torch.cat(pixels), sequences)
        merged = merged_squares(states, self.squeeze)
        embeds = self.multi_modal_projector(merged.flatten(0, 1))
        return list(embeds.split([len(tiles) * merged.shape[1] for tiles in pixels]))


def internvl_text_config(hf_config: Any) -> dict[str, Any]:
    """The config.json of the language part."""
    found = text_config(hf_config, {"model_type": "qwen2"})
    tied = HFConfig(hf_config).get("tie_word_embeddings", bool, True)
    found["tie_word_embeddings"] = tied
    return found


class InternVLForConditionalGeneration(ComposedModel):
    """InternVL with its language-modeling head."""

    encoder_class = InternVLImages

    def text_config(self) -> dict[str, Any]:
        return internvl_text_config(self.vllm_config.hf_config)

    def encode_items(
        self, modality: str, items: list[dict[str, Tensor]], sequences: EncoderSequences
    ) -> list[Tensor]:
        name = "pixel_values_videos" if modality == "video" else "pixel_values"
        part: Any = self.encoder
        embeds: list[Tensor] = part.embeddings([item[name] for item in items], sequences)
        return embeds

    def example_items(self) -> list[tuple[str, dict[str, Array]]]:
        shape = tower_shape(self.vllm_config.hf_config)
        return [("image", {"pixel_values": Array.of(np.zeros((1, *shape.picture), np.float32))})]
