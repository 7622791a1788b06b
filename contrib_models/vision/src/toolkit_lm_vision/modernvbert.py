"""ModernVBERT (Teiletche et al. 2025): SigLIP over tiles of a picture, as in Idefics3, and
ModernBERT, which reads texts and pictures in both directions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec
from toolkit_lm.config import VllmConfig
from toolkit_lm.messages import Array
from toolkit_lm.model import IntermediateTensors, Model
from toolkit_lm_decoder.composed import ComposedModel
from toolkit_lm_encoder.modernbert import ModernBertEncoder
from torch import Tensor

from toolkit_lm_vision.idefics3 import Idefics3Images, example_tile
from toolkit_lm_vision.modernvbert_rules import like_idefics3
from toolkit_lm_vision.renamed import Renamed
from toolkit_lm_vision.towers import VisionTower

_NAMES = (
    (re.compile(r"^(model\.)?text_model\."), "model.language_model."),
    (re.compile(r"^(model\.)?vision_model\."), "model.vision_tower."),
    (
        re.compile(r"^(model\.)?connector\.modality_projection\."),
        "connector.modality_projection.proj.",
    ),
)
"""Names of this family's weights, as Idefics3 has them here."""


class ModernVBertText(ModernBertEncoder):
    """ModernBERT, in which embeddings of pictures may stand for those of tokens."""

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        part: Any = self.embeddings
        embedded: Tensor = part.tok_embeddings(input_ids)
        return embedded

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        *,
        inputs_embeds: Tensor | None = None,
        intermediate: IntermediateTensors | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        if inputs_embeds is None or intermediate is not None:
            return super().forward(input_ids, positions, intermediate=intermediate)
        part: Any = self.embeddings
        x = self.run_layers(part.norm(inputs_embeds), positions)
        return x if self.is_last else {"hidden_states": x}


class ModernVBertImages(Idefics3Images):
    """Pixels of each picture's tiles [1, n, channels, S, S] -> its embeddings [n * tokens, H]. A
    tower of SigLIP's own positions."""

    tower_class = VisionTower


class ModernVBert(ComposedModel):
    """ModernVBERT without a head."""

    encoder_class = ModernVBertImages

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=like_idefics3(vllm_config), prefix=prefix)

    def make_language_model(self, prefix: str) -> Model:
        checkpoint = self.vllm_config.checkpoint
        assert checkpoint is not None, "the config is not resolved: it has no checkpoint"
        own = msgspec.structs.replace(checkpoint, hf_config=self.text_config())
        return ModernVBertText(vllm_config=self.vllm_config.with_checkpoint(own), prefix=prefix)

    def text_config(self) -> dict[str, Any]:
        found: dict[str, Any] = self.vllm_config.hf_config["text_config"]
        return found

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(Renamed(weights, _NAMES))

    def example_items(self) -> list[tuple[str, dict[str, Array]]]:
        return [example_tile(self.vllm_config)]
