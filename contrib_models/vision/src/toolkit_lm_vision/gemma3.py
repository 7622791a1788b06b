"""Gemma 3 with its eyes: SigLIP's states, pooled, and the text model, which reads the tokens of a
picture in both directions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from toolkit_lm.attention import CacheLayer
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.messages import Array
from toolkit_lm.model import (
    HFConfig,
    Shard,
    ShardLoader,
    join,
    new_parameter,
    torch_dtype,
)
from toolkit_lm.parts import EncoderSequences
from toolkit_lm_decoder.composed import ComposedModel, text_config
from toolkit_lm_decoder.gemma2 import GemmaRMSNorm
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit_lm_vision.gemma3_rules import tokens_per_side
from toolkit_lm_vision.shape import VisionShape, text_size
from toolkit_lm_vision.towers import TowerModel, VisionTower

_DEFAULTS: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
"""Defaults of transformers, which published configs leave out."""


class Gemma3Projector(nn.Module):
    """States of patches [N, side * side, tower's size] -> [N, tokens, H]: means over squares of
    them, normed and projected."""

    def __init__(self, shape: VisionShape, size: int, *, vllm_config: VllmConfig) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        width = shape.hidden_size
        self.side = shape.side
        self.pooled = self.side // tokens_per_side(
            config.get("mm_tokens_per_image", int, 256), self.side
        )
        self.mm_input_projection_weight = new_parameter(
            (width, size), torch_dtype(vllm_config.model.dtype), ShardLoader((Shard.whole(width),))
        )
        self.mm_soft_emb_norm = GemmaRMSNorm(width, eps=shape.eps, vllm_config=vllm_config)

    def forward(self, states: Tensor) -> Tensor:
        squares = states.transpose(1, 2).reshape(len(states), -1, self.side, self.side)
        pooled = F.avg_pool2d(squares, self.pooled).flatten(2).transpose(1, 2)
        normed: Tensor = self.mm_soft_emb_norm(pooled.contiguous())
        return normed @ self.mm_input_projection_weight


class Gemma3Images(TowerModel):
    """Pixels of pictures [1, channels, S, S] -> embeddings of each [tokens, H]."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        shape = VisionShape.read(vllm_config.hf_config)
        if shape.is_clip:
            raise UnsupportedError(
                "config.json: 'vision_config' must be of a SigLIP model: Gemma 3 pools its "
                "patches only."
            )
        self.vision_tower = VisionTower(
            shape,
            [shape.num_layers],
            normed=True,
            vllm_config=vllm_config,
            prefix=join(prefix, "vision_tower"),
        )
        size = text_size(text_config(vllm_config.hf_config, _DEFAULTS))
        self.multi_modal_projector = Gemma3Projector(shape, size, vllm_config=vllm_config)

    def embeddings(self, pixels: list[Tensor], sequences: EncoderSequences) -> list[Tensor]:
        (states,) = self.vision_tower(torch.cat(pixels), sequences)
        return list(self.multi_modal_projector(states))


class Gemma3ForConditionalGeneration(ComposedModel):
    """Gemma 3 with its language-modeling head."""

    encoder_class = Gemma3Images

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for module in self.language_model.modules():
            if isinstance(module, CacheLayer):
                module.params = replace(module.params, spans=True)

    def text_config(self) -> dict[str, Any]:
        found = text_config(self.vllm_config.hf_config, _DEFAULTS)
        return {
            **found,
            "tie_word_embeddings": HFConfig(self.vllm_config.hf_config).get(
                "tie_word_embeddings", bool, True
            ),
        }

    def example_items(self) -> list[tuple[str, dict[str, Array]]]:
        shape = VisionShape.read(self.vllm_config.hf_config)
        return [("image", {"pixel_values": Array.of(np.zeros((1, *shape.picture), np.float32))})]
