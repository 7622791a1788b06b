"""ColPali (Faysse et al. 2024), ColQwen2 and ColModernVBERT: vectors of each token of a page's
picture, or of a query, for late interaction."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from toolkit_lm.config import PoolingTask, VllmConfig
from toolkit_lm.messages import MultiModalFeatureSpec
from toolkit_lm.model import (
    Absent,
    HFConfig,
    IntermediateTensors,
    Model,
    ReplicatedLinear,
    is_last_stage,
    join,
)
from toolkit_lm.parts import MediaPart
from toolkit_lm.step import StepInputs
from toolkit_lm_decoder.composed import ComposedModel
from toolkit_lm_poolers import AllPooler, EmbeddingHead
from torch import Tensor, nn

from toolkit_lm_vision.modernvbert import ModernVBert
from toolkit_lm_vision.paligemma import PaliGemmaForConditionalGeneration
from toolkit_lm_vision.qwen2_vl import Qwen2VLForConditionalGeneration
from toolkit_lm_vision.retrieval_rules import language_and_vision

_PROJECTION = "embedding_proj_layer."
_NAMES = (
    (re.compile(r"^vlm\."), ""),
    # A language model without its head lacks the name of what has one.
    (re.compile(r"^language_model\.(?!model\.|lm_head\.)"), "model.language_model."),
)
_HEAD = re.compile(r"^(language_model\.)?lm_head\.")
_DIMENSIONS = 128


class WholePrompts(MediaPart):
    """Prompts whose tokens all see each other, with media and without."""

    def groups(self, inputs: StepInputs) -> None:
        spans = np.stack((inputs.token_index, inputs.token_index + 1), axis=1).astype(np.int32)
        for index, scheduled in enumerate(inputs.plan.scheduled):
            tokens = slice(int(inputs.query_start[index]), int(inputs.query_start[index + 1]))
            spans[tokens] = scheduled.start, scheduled.start + scheduled.num_tokens
        inputs.spans = spans


class WholePooler(AllPooler):
    """A vector for each token of a prompt that is computed whole."""

    def chunkable(self, task: PoolingTask) -> bool:
        return False


class Projection(Model):
    """Hidden states [T, H] -> [T, dimensions]."""

    def __init__(self, sizes: tuple[int, int], *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.embedding_proj_layer = ReplicatedLinear(
            *sizes, bias=True, vllm_config=vllm_config, prefix=join(prefix, "embedding_proj_layer")
        )

    def project(self, states: Tensor) -> Tensor:
        out: Tensor = self.embedding_proj_layer(states)
        return out


class RetrievalModel(ComposedModel):
    """Mixed into a language model that sees: its hidden states are projected, and it has no head.
    It serves token_embed."""

    pooler_class: type[AllPooler] = AllPooler

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        inner = language_and_vision(vllm_config)
        super().__init__(vllm_config=inner, prefix=prefix)
        self.is_last = is_last_stage(vllm_config.parallel)
        self.projection: nn.Module = Absent()
        if self.is_last:
            size = HFConfig(vllm_config.hf_config).get("embedding_dim", int, _DIMENSIONS)
            hidden = HFConfig(self.text_config()).require("hidden_size", int)
            self.projection = Projection((hidden, size), vllm_config=inner, prefix=prefix)
            self.pooler = self.pooler_class(
                {"token_embed"}, EmbeddingHead(size, nn.Identity(), normalize=True)
            )

    # A pooling model gives no logits of tokens.
    compute_logits = Model.compute_logits

    def text_config(self) -> dict[str, Any]:
        # With the embedding as its head, the language part has no weights that files lack.
        return {**super().text_config(), "tie_word_embeddings": True}

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        *,
        inputs_embeds: Tensor | None = None,
        intermediate: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:
        out = super().forward(
            input_ids, positions, inputs_embeds=inputs_embeds, intermediate=intermediate
        )
        if isinstance(self.projection, Projection):
            assert isinstance(out, Tensor)
            return self.projection.project(out)
        return out

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        named = list(_named(weights))
        projected = [(name, tensor) for name, tensor in named if name.startswith(_PROJECTION)]
        loaded = super().load_weights(
            [(name, tensor) for name, tensor in named if not name.startswith(_PROJECTION)]
        )
        if isinstance(self.projection, Projection):
            loaded |= {f"projection.{name}" for name in self.projection.load_weights(projected)}
        return loaded


def _named(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights by the names of the language model that sees, without its head."""
    for name, tensor in weights:
        for pattern, replacement in _NAMES:
            name = pattern.sub(replacement, name)
        if not _HEAD.match(name):
            yield name, tensor


class ColPaliForRetrieval(RetrievalModel, PaliGemmaForConditionalGeneration):
    """PaliGemma for retrieval. All of a prompt sees all of it, texts too, since its processor marks
    all tokens as a prefix."""

    parts = {"media": WholePrompts}
    pooler_class = WholePooler


class ColQwen2ForRetrieval(RetrievalModel, Qwen2VLForConditionalGeneration):
    """Qwen2-VL for retrieval. Tokens of pictures have the positions of text: transformers gives
    this model embeddings alone, of which it computes no positions in height and width."""

    modalities = ("image",)

    def prompt_positions(
        self, token_ids: np.ndarray, features: Sequence[MultiModalFeatureSpec]
    ) -> Any:
        return None


class ColModernVBertForRetrieval(RetrievalModel, ModernVBert):
    """ModernVBERT for retrieval."""
