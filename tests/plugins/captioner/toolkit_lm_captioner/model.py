"""CaptionerModel: Scribe, with an eye of one layer for the tiles of images in its decoder's
prompt."""

from __future__ import annotations

import numpy as np
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.messages import Array
from toolkit_lm.model import HFConfig, ReplicatedLinear, see_encoder_tokens
from toolkit_lm.parts import EncoderPart, EncoderSequences, MediaPart
from toolkit_lm_scribe.model import ScribeModel
from torch import Tensor


class CaptionerModel(ScribeModel):
    parts = {"media": MediaPart, "encoder": EncoderPart}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        self.numbers = config.require("tile_size", int) ** 2
        size = config.require("hidden_size", int)
        self.eye = ReplicatedLinear(
            self.numbers, size, bias=False, vllm_config=vllm_config, prefix="eye"
        )
        see_encoder_tokens(self.eye)

    def encode_items(
        self, modality: str, items: list[dict[str, Tensor]], sequences: EncoderSequences
    ) -> list[Tensor]:
        tiles = [item["tiles"].flatten(0, 1) for item in items]
        seen: Tensor = self.eye(torch.cat(tiles).to(self.eye.spec.dtype))
        return list(seen.split([len(one) for one in tiles]))

    def example_items(self) -> list[tuple[str, dict[str, Array]]]:
        return [("image", {"tiles": Array.of(np.zeros((2, 2, self.numbers), np.float32))})]

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        *,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
    ) -> Tensor:  # type: ignore[override]
        x: Tensor = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        x = x + self.positions(positions)
        for layer in self.decoder:
            x = layer(x, encoder_hidden_states)
        return x
