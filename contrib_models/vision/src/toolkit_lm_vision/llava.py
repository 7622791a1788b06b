"""LLaVA (Liu et al. 2023): a vision tower, two layers that project its states, and any language
model."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.messages import Array
from toolkit_lm.model import (
    ColumnParallelLinear,
    HFConfig,
    Model,
    RowParallelLinear,
    join,
)
from toolkit_lm.parts import EncoderSequences
from toolkit_lm_decoder.composed import ComposedModel, text_config
from torch import Tensor, nn

from toolkit_lm_vision.llava_rules import TakenStates
from toolkit_lm_vision.pixtral import Grid, PixtralImages, example_picture
from toolkit_lm_vision.pixtral_rules import is_pixtral
from toolkit_lm_vision.shape import VisionShape, text_size
from toolkit_lm_vision.towers import TowerModel, VisionTower

_SIZES = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES, "intermediate_size": 11008},
    "mistral": {
        **_SIZES,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen2": {**_SIZES, "intermediate_size": 22016, "vocab_size": 151936},
}
"""Defaults of transformers by model_type, which published configs leave out."""


class LlavaProjector(nn.Module):
    """States [..., tower's size] -> [..., H]."""

    bias: ClassVar[bool] = True
    """Whether the layers have biases, where config.json does not say it."""

    def __init__(self, input_size: int, size: int, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        bias = config.get("multimodal_projector_bias", bool, self.bias)
        activation = config.get("projector_hidden_act", str, "gelu")
        self.linear_1 = ColumnParallelLinear(
            input_size,
            size,
            bias=bias,
            activation=activation,
            vllm_config=vllm_config,
            prefix=join(prefix, "linear_1"),
        )
        self.linear_2 = RowParallelLinear(
            size, size, bias=bias, vllm_config=vllm_config, prefix=join(prefix, "linear_2")
        )

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.linear_2(self.linear_1(states))
        return out


class LlavaImages(TowerModel):
    """Pixels of pictures [1, channels, S, S] -> embeddings of each [n, H]."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.shape = VisionShape.read(vllm_config.hf_config)
        self.taken = TakenStates.read(vllm_config.hf_config, self.shape)
        self.vision_tower = VisionTower(
            self.shape,
            self.taken.layers,
            normed=False,
            vllm_config=vllm_config,
            prefix=join(prefix, "vision_tower"),
        )
        size = text_size(llava_text_config(vllm_config.hf_config))
        self.multi_modal_projector = LlavaProjector(
            self.shape.hidden_size * len(self.taken.layers),
            size,
            vllm_config=vllm_config,
            prefix=join(prefix, "multi_modal_projector"),
        )

    def embeddings(self, pixels: list[Tensor], sequences: EncoderSequences) -> list[Tensor]:
        states = self.vision_tower(torch.cat(pixels), sequences)
        taken = torch.cat([state[:, self.taken.first :] for state in states], dim=-1)
        projected: Tensor = self.multi_modal_projector(taken.flatten(0, 1))
        return list(projected.view(*taken.shape[:2], -1))


class PixtralLlavaImages(PixtralImages):
    """Pixels of pictures of any size [1, channels, height, width] -> embeddings of each [n, H]."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.multi_modal_projector = LlavaProjector(
            self.shape.hidden_size * len(self.layers),
            text_size(llava_text_config(vllm_config.hf_config)),
            vllm_config=vllm_config,
            prefix=join(prefix, "multi_modal_projector"),
        )

    def projected(self, states: Tensor, grids: list[Grid]) -> Tensor:
        found: Tensor = self.multi_modal_projector(states)
        return found


def llava_text_config(hf_config: Any) -> dict[str, Any]:
    """The config.json of the language part."""
    text = HFConfig(hf_config).require("text_config", dict)
    kind = HFConfig(text).get("model_type", str, "llama")
    found = text_config(hf_config, {"model_type": "llama", **_DEFAULTS.get(kind, {})})
    # Either of them may say it.
    found["tie_word_embeddings"] = any(
        HFConfig(part).get("tie_word_embeddings", bool, False) for part in (hf_config, text)
    )
    return found


class LlavaForConditionalGeneration(ComposedModel):
    """LLaVA with its language-modeling head."""

    encoder_class = LlavaImages

    def encoder_type(self) -> type[Model]:
        sees_any_size = is_pixtral(self.vllm_config.hf_config)
        return PixtralLlavaImages if sees_any_size else self.encoder_class

    def text_config(self) -> dict[str, Any]:
        return llava_text_config(self.vllm_config.hf_config)

    def example_items(self) -> list[tuple[str, dict[str, Array]]]:
        if is_pixtral(self.vllm_config.hf_config):
            return [("image", example_picture(self.vllm_config))]
        shape = VisionShape.read(self.vllm_config.hf_config)
        return [("image", {"pixel_values": Array.of(np.zeros((1, *shape.picture), np.float32))})]
