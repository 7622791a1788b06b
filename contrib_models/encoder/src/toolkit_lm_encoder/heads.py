"""Heads of encoders: vectors, or a classifier's logits. Heads are small, and compute in float32."""

from __future__ import annotations

from typing import ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.model import HeadLinear, HFConfig, get_activation
from toolkit_lm_poolers import (
    RowPooler,
    classification_pooler,
    embedding_pooler,
    num_labels_of,
    token_classification_pooler,
)
from torch import Tensor, nn

from toolkit_lm_encoder.encoder import Encoder

OUT_PROJ = (r"^classifier\.", "classifier.out_proj.")
"""The name of a classifier that is one projection."""
DENSE = (r"^pooler\.", "classifier.")
"""BERT's pooler is the first projection of its classifier."""


class ClassificationHead(nn.Module):
    """Vectors [N, H] -> logits [N, labels], float32: a projection, after another one with
    `activation` where that is given."""

    def __init__(
        self,
        size: int,
        labels: int,
        *,
        activation: str | None = None,
        bias: bool = True,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.dense = None if activation is None else HeadLinear(size, size, bias=bias)
        self.activation = get_activation(activation or "tanh")
        self.norm = norm
        self.out_proj = HeadLinear(size, labels)

    def forward(self, x: Tensor) -> Tensor:
        if self.dense is not None:
            x = self.activation(self.dense(x))
        if self.norm is not None:
            x = self.norm(x)
        logits: Tensor = self.out_proj(x)
        return logits


class Embedder(Encoder):
    """An encoder that gives embeddings, of texts or of tokens."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if self.is_last:
            self.pooler = self.make_pooler(vllm_config)

    def make_pooler(self, vllm_config: VllmConfig) -> RowPooler:
        # sentence-transformers does this for a checkpoint that does not say how it is pooled.
        return embedding_pooler(vllm_config, default="MEAN")


class SequenceClassifier(Encoder):
    """An encoder with a classifier of its first token."""

    activation: ClassVar[str] = "tanh"
    """Activation of the classifier's first projection."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if self.is_last:
            config = HFConfig(vllm_config.hf_config)
            self.classifier = self.make_classifier(config)
            self.pooler = classification_pooler(
                vllm_config, self.classifier, default=self.pooling(config)
            )

    def make_classifier(self, config: HFConfig) -> ClassificationHead:
        return ClassificationHead(
            self.hidden_size(config), num_labels_of(dict(config.values)), activation=self.activation
        )

    def pooling(self, config: HFConfig) -> str:
        """Pooling type: the hidden states to classify."""
        return "CLS"


class TokenClassifier(Encoder):
    """An encoder with a classifier of every token."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if self.is_last:
            self.classifier = self.make_classifier(HFConfig(vllm_config.hf_config))
            self.pooler = token_classification_pooler(vllm_config, self.classifier)

    def make_classifier(self, config: HFConfig) -> ClassificationHead:
        return ClassificationHead(self.hidden_size(config), num_labels_of(dict(config.values)))
