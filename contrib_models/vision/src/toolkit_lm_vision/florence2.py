"""Florence-2 (Xiao et al. 2023): DaViT's states, projected, and BART, whose encoder reads them
before the tokens of a task."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import msgspec
import numpy as np
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.messages import Array, EncoderInput
from toolkit_lm.model import (
    HFConfig,
    Model,
    ParallelLMHead,
    join,
    logits_of,
    see_encoder_tokens,
    torch_dtype,
)
from toolkit_lm.parts import EncoderPart
from toolkit_lm_encdec.attention import PACKED
from toolkit_lm_encdec.bart import BartModel, Style
from torch import Tensor, nn

from toolkit_lm_vision.florence2_rules import florence2_text_config, image_token_id
from toolkit_lm_vision.florence2_shape import DaViTShape
from toolkit_lm_vision.florence2_tower import DaViT, Florence2Projector

_PIXEL_DIMENSIONS = 4


class Florence2Model(nn.Module):
    """The tower, what projects its states, and BART."""

    def __init__(self, shape: DaViTShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.dtype = torch_dtype(vllm_config.model.dtype)
        self.vision_tower = DaViT(
            shape, vllm_config=vllm_config, prefix=join(prefix, "vision_tower")
        )
        self.multi_modal_projector = Florence2Projector(
            shape, vllm_config=vllm_config, prefix=join(prefix, "multi_modal_projector")
        )
        for part in (self.vision_tower, self.multi_modal_projector):
            see_encoder_tokens(part)
        self.language_model = BartModel(
            Style(),
            shares_embedding=True,
            vllm_config=vllm_config,
            prefix=join(prefix, "language_model"),
        )

    def embeddings(self, pixels: Sequence[Tensor]) -> list[Tensor]:
        """Embeddings [tokens, H] of each picture [1, channels, height, width]. Neighbours of one
        size are computed at a time."""
        found: list[Tensor] = []
        for _, alike in groupby(pixels, key=lambda picture: picture.shape):
            states = self.vision_tower(torch.cat(list(alike)).to(self.dtype))
            found += self.multi_modal_projector(states)
        return found


class Florence2ForConditionalGeneration(Model):
    """Florence-2 with its language-modeling head."""

    parts = {"encoder": EncoderPart}
    packed = PACKED

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        assert vllm_config.checkpoint is not None, "the config is not resolved: no checkpoint"
        self.max_encoder_len = vllm_config.max_encoder_len
        hf_config = vllm_config.hf_config
        self.shape = DaViTShape.read(hf_config)
        self.image_token_id = image_token_id(hf_config)
        text = HFConfig(florence2_text_config(hf_config))
        size = text.require("d_model", int)
        if self.shape.projected_size != size:
            raise CheckpointError(
                f"config.json: 'projection_dim' {self.shape.projected_size} of 'vision_config' "
                f"must be 'd_model' of 'text_config', {size}."
            )
        # All layers but those of the tower read the language part's fields.
        own = vllm_config.with_checkpoint(
            msgspec.structs.replace(vllm_config.checkpoint, hf_config=dict(text.values))
        )
        Style().positions.check(text.require("max_position_embeddings", int), own)
        self.model = Florence2Model(self.shape, vllm_config=own, prefix=join(prefix, "model"))
        is_tied = HFConfig(hf_config).get("tie_word_embeddings", bool, True)
        self.lm_head = ParallelLMHead(
            text.require("vocab_size", int),
            size,
            tied_to=self.model.language_model.shared if is_tied else None,
            vllm_config=own,
            prefix=join(prefix, "lm_head"),
        )

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        embedded: Tensor = self.model.language_model.shared(input_ids)
        return embedded

    def encode(
        self, input_ids: Tensor, positions: Tensor, *, features: Sequence[Tensor] = ()
    ) -> Tensor:
        """States [T, H] of prompts. `features` are pixels [1, channels, height, width] or
        embeddings [n, H] of the pictures: of each sequence that has image tokens, in order."""
        x = self.embed_input_ids(input_ids)
        if features:
            embeds = torch.cat(self._embedded(features))
            x[input_ids == self.image_token_id] = embeds.to(x.dtype)
        out: Tensor = self.model.language_model.encoder(input_ids, positions, inputs_embeds=x)
        return out

    def _embedded(self, features: Sequence[Tensor]) -> list[Tensor]:
        pixels = [array for array in features if array.ndim == _PIXEL_DIMENSIONS]
        made = iter(self.model.embeddings(pixels))
        return [next(made) if array.ndim == _PIXEL_DIMENSIONS else array for array in features]

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, positions: Tensor, *, encoder_hidden_states: Tensor | None = None
    ) -> Tensor:
        decoder = self.model.language_model.decoder
        out: Tensor = decoder(input_ids, positions, encoder_hidden_states)
        return out

    @logits_of("lm_head")
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden_states)
        return logits

    def example_input(self, num_tokens: int) -> EncoderInput:
        """A black picture, as large as there is room for, and any tokens after it."""
        picture = self.shape.picture(min(num_tokens, self.max_encoder_len))
        if picture is None:
            return EncoderInput.of_tokens([0] * num_tokens)
        tokens = [self.image_token_id] * self.shape.num_tokens(*picture[1:])
        return EncoderInput(
            num_tokens=num_tokens,
            token_ids=tokens + [0] * (num_tokens - len(tokens)),
            features=Array.of(np.zeros((1, *picture), np.float32)),
        )
