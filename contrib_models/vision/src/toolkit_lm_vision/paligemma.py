"""PaliGemma and PaliGemma 2 (Beyer et al. 2024, Steiner et al. 2024): SigLIP's states, projected,
and Gemma, which reads a prompt in both directions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from toolkit_lm.attention import CacheLayer
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, UnsupportedError
from toolkit_lm.messages import Array
from toolkit_lm.model import HFConfig, ReplicatedLinear, join
from toolkit_lm.parts import EncoderSequences, MediaPart
from toolkit_lm.step import StepInputs
from toolkit_lm_decoder.composed import ComposedModel, text_config
from torch import Tensor, nn

from toolkit_lm_vision.shape import VisionShape, text_size
from toolkit_lm_vision.towers import TowerModel, VisionTower

_SIZES: dict[str, dict[str, Any]] = {
    "gemma": {
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 256_000,
        "head_dim": 256,
        "max_position_embeddings": 8192,
    },
    "gemma2": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 256_000,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
}
"""Defaults of transformers by model_type, which published configs leave out."""


class PrefixPart(MediaPart):
    """Media in prompts whose tokens all see each other."""

    def groups(self, inputs: StepInputs) -> None:
        found = list(self._touched(inputs))
        if not found:
            return
        spans = np.stack((inputs.token_index, inputs.token_index + 1), axis=1).astype(np.int32)
        for index, start, end, feature in found:
            prompt = feature.mm_position
            first = int(inputs.query_start[index])
            spans[first : first + min(end, prompt.end) - start] = prompt.offset, prompt.end
        inputs.spans = spans


class PaliGemmaProjector(nn.Module):
    """States [T, tower's size] -> [T, H]."""

    def __init__(self, input_size: int, size: int, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.linear = ReplicatedLinear(
            input_size, size, bias=True, vllm_config=vllm_config, prefix=join(prefix, "linear")
        )

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.linear(states)
        return out


class PaliGemmaImages(TowerModel):
    """Pixels of pictures [1, channels, S, S] -> embeddings of each [tokens, H]."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        shape = VisionShape.read(vllm_config.hf_config)
        if shape.is_clip:
            raise UnsupportedError("config.json: 'vision_config' must be of a SigLIP model.")
        size = text_size(paligemma_text_config(vllm_config.hf_config))
        projected = HFConfig(vllm_config.hf_config).get("projection_dim", int, 2048)
        if projected != size:
            raise CheckpointError(
                f"config.json: 'projection_dim' {projected} must be the hidden size of "
                f"'text_config', {size}."
            )
        self.vision_tower = VisionTower(
            shape,
            [shape.num_layers],
            normed=True,
            vllm_config=vllm_config,
            prefix=join(prefix, "vision_tower"),
        )
        self.multi_modal_projector = PaliGemmaProjector(
            shape.hidden_size,
            size,
            vllm_config=vllm_config,
            prefix=join(prefix, "multi_modal_projector"),
        )

    def embeddings(self, pixels: list[Tensor], sequences: EncoderSequences) -> list[Tensor]:
        (states,) = self.vision_tower(torch.cat(pixels), sequences)
        projected: Tensor = self.multi_modal_projector(states.flatten(0, 1))
        return list(projected.view(*states.shape[:2], -1))


def paligemma_text_config(hf_config: Any) -> dict[str, Any]:
    """The config.json of the language part, a decoder: prompts that see both ways are this
    model's."""
    text = HFConfig(hf_config).require("text_config", dict)
    kind = HFConfig(text).get("model_type", str, "gemma")
    found = text_config(hf_config, {"model_type": "gemma", **_SIZES.get(kind, {})})
    found.pop("use_bidirectional_attention", None)
    found["tie_word_embeddings"] = HFConfig(hf_config).get("tie_word_embeddings", bool, True)
    return found


class PaliGemmaForConditionalGeneration(ComposedModel):
    """PaliGemma with its language-modeling head."""

    parts = {"media": PrefixPart}
    encoder_class = PaliGemmaImages

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for module in self.language_model.modules():
            if isinstance(module, CacheLayer):
                module.params = replace(module.params, spans=True)

    def text_config(self) -> dict[str, Any]:
        return paligemma_text_config(self.vllm_config.hf_config)

    def example_items(self) -> list[tuple[str, dict[str, Array]]]:
        shape = VisionShape.read(self.vllm_config.hf_config)
        return [("image", {"pixel_values": Array.of(np.zeros((1, *shape.picture), np.float32))})]
