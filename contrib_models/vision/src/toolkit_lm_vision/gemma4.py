"""Gemma 4 with its eyes: a tower that reads pictures and frames of any size, and the text model,
whose layers' own embeddings take a picture's tokens for padding."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt
from typing import Any

import numpy as np
import torch
from toolkit_lm.attention import CacheLayer
from toolkit_lm.config import VllmConfig
from toolkit_lm.messages import Array
from toolkit_lm.model import (
    HFConfig,
    IntermediateTensors,
    Model,
    ReplicatedLinear,
    join,
)
from toolkit_lm.parts import EncoderSequences
from toolkit_lm_decoder.composed import ComposedModel, text_config
from toolkit_lm_decoder.per_layer import UnitRMSNorm
from torch import Tensor, nn

from toolkit_lm_vision.frames import TIMES
from toolkit_lm_vision.gemma4_rules import NAMES, Gemma4Shape
from toolkit_lm_vision.gemma4_tower import Gemma4Tower
from toolkit_lm_vision.shape import text_size

_DEFAULTS: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
}
"""Defaults of transformers, which configs may leave out."""
_MEDIA = {"image": 258_880, "video": 258_884, "audio": 258_881}
"""Tokens that config.json may leave out."""
_TOKENS_PER_SIDE = 16
"""Of a usual picture, which has at most 280 tokens."""


class Gemma4Embedder(nn.Module):
    """States [N, tower's size] -> embeddings [N, H]."""

    def __init__(
        self, shape: Gemma4Shape, size: int, *, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        self.norm = UnitRMSNorm(shape.hidden_size, eps=shape.eps)
        self.embedding_projection = ReplicatedLinear(
            shape.hidden_size,
            size,
            vllm_config=vllm_config,
            prefix=join(prefix, "embedding_projection"),
        )

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.embedding_projection(self.norm(states))
        return out


class Gemma4Images(Model):
    """Patches of pictures and their places -> embeddings of each [n, H]."""

    renames = ((r"^model\.", ""),)
    # Recordings are not read.
    ignored = (r"^(model\.)?(audio_tower|embed_audio)\.",)

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.shape = Gemma4Shape.read(vllm_config.hf_config)
        self.vision_tower = Gemma4Tower(
            self.shape, vllm_config=vllm_config, prefix=join(prefix, "vision_tower")
        )
        self.embed_vision = Gemma4Embedder(
            self.shape,
            text_size(text_config(vllm_config.hf_config, _DEFAULTS)),
            vllm_config=vllm_config,
            prefix=join(prefix, "embed_vision"),
        )

    def forward(  # type: ignore[override]
        self, patches: list[Tensor], places: list[Tensor], sequences: EncoderSequences
    ) -> list[Tensor]:
        embeds: Tensor = self.embed_vision(self.vision_tower(patches, places, sequences))
        return list(
            torch.split(embeds, [len(picture) // self.shape.pooled**2 for picture in patches])
        )


class Gemma4ForConditionalGeneration(ComposedModel):
    """Gemma 4 with its language-modeling head."""

    encoder_class = Gemma4Images

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        text = HFConfig(self.text_config())
        config = HFConfig(vllm_config.hf_config)
        self.media_tokens = [
            config.get(f"{name}_token_id", int, default) for name, default in _MEDIA.items()
        ]
        self.pad_token = text.get("pad_token_id", int) or 0
        if text.get("use_bidirectional_attention", object) == "vision":
            for module in self.language_model.modules():
                # Global layers are causal, pictures and all.
                if isinstance(module, CacheLayer) and module.params.window is not None:
                    module.params = replace(module.params, spans=True)

    def text_config(self) -> dict[str, Any]:
        return {
            **text_config(self.vllm_config.hf_config, _DEFAULTS),
            "tie_word_embeddings": HFConfig(self.vllm_config.hf_config).get(
                "tie_word_embeddings", bool, True
            ),
        }

    def encode_items(
        self, modality: str, items: list[dict[str, Tensor]], sequences: EncoderSequences
    ) -> list[Tensor]:
        names = NAMES[modality]
        patches = [picture for item in items for picture in item[names.pixels]]
        places = [picture for item in items for picture in item[names.places]]
        counts = [int((picture[:, 0] >= 0).sum()) for picture in places]
        embeds: list[Tensor] = self.encoder(
            [picture[:count] for picture, count in zip(patches, counts, strict=True)],
            [picture[:count] for picture, count in zip(places, counts, strict=True)],
            sequences,
        )
        every = iter(embeds)
        return [torch.cat([next(every) for _ in item[names.pixels]]) for item in items]

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return super().embed_input_ids(self._padded(input_ids))

    def _padded(self, input_ids: Tensor) -> Tensor:
        """Token ids with padding in place of tokens of media, drawn ones too."""
        for token in self.media_tokens:
            input_ids = input_ids.masked_fill(input_ids == token, self.pad_token)
        return input_ids

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        *,
        inputs_embeds: Tensor | None = None,
        intermediate: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:
        decoder = self.language_model.get_submodule("model")
        out: Tensor | IntermediateTensors = decoder(
            self._padded(input_ids),
            positions,
            inputs_embeds=inputs_embeds,
            intermediate=intermediate,
        )
        return out

    def example_items(self) -> list[tuple[str, dict[str, Array]]]:
        shape = (
            self.encoder.shape
            if isinstance(self.encoder, Gemma4Images)
            else Gemma4Shape.read(self.vllm_config.hf_config)
        )
        most = self.vllm_config.max_model_len - 3
        side = shape.pooled * max(1, min(_TOKENS_PER_SIDE, isqrt(max(most, 1))))
        places = np.stack(np.meshgrid(np.arange(side), np.arange(side)), axis=-1).reshape(1, -1, 2)
        pixels = np.zeros((1, side**2, shape.patch_values), np.float32)
        arrays = {"pixel_values": Array.of(pixels), "image_position_ids": Array.of(places)}
        frame = {"pixel_values_videos": Array.of(pixels), "video_position_ids": Array.of(places)}
        return [("image", arrays), ("video", {**frame, TIMES: Array.of(np.zeros(1))})]
