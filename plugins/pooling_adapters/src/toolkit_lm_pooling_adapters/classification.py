"""Language models as classifiers and rerankers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.model import Model
from toolkit_lm.pooling import Pooler
from toolkit_lm_poolers import classification_pooler, token_classification_pooler
from toolkit_lm_poolers.limits import hidden_size
from torch import Tensor

from toolkit_lm_pooling_adapters.classifier import Classifier
from toolkit_lm_pooling_adapters.converted import Converted, is_pooling_model, subclass
from toolkit_lm_pooling_adapters.origin import Origin, classifier_origin


class SequenceClassifier(Converted):
    """Classes or a score of the last token, unless an option says otherwise."""

    origin: ClassVar[Origin]
    """Origin of the classifier's weights."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        has_bias = self.head_has_bias if self.origin.is_from_head else self.origin.has_bias
        self.score = Classifier(
            hidden_size(vllm_config.hf_config), self.origin.num_labels, bias=has_bias
        )
        self.pooler = self.make_pooler(vllm_config)

    def make_pooler(self, vllm_config: VllmConfig) -> Pooler:
        return classification_pooler(
            vllm_config, self.score, default="LAST", num_labels=self.origin.num_labels
        )

    def load_head(self, name: str, tensor: Tensor) -> None:
        if self.origin.is_from_head:
            self.score.fill(name, self.origin.of_head(tensor))

    def load_score(self, name: str, tensor: Tensor) -> None:
        if not self.origin.is_from_head:
            self.score.fill(name, tensor)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = super().load_weights(weights)
        if self.has_head:
            self.score.check_filled(self.head_name)
        return loaded


class TokenClassifier(SequenceClassifier):
    """Classes of each token: what transformers' `...ForTokenClassification` was trained for."""

    def make_pooler(self, vllm_config: VllmConfig) -> Pooler:
        return token_classification_pooler(
            vllm_config, self.score, num_labels=self.origin.num_labels
        )


def as_seq_cls_model(model_class: type[Model], vllm_config: VllmConfig) -> type[Model]:
    """The classifier's class of a language model's: `LlamaForCausalLMForSequenceClassification` of
    `LlamaForCausalLM`.

    Where config.json's architecture is a `...ForTokenClassification`, it is a
    `...ForTokenClassification` too, and classifies tokens only. A class that is a pooling model
    already comes back unchanged. Raises UnsupportedError for a model without a head to take away,
    and for a checkpoint that gives no classifier; ConfigError and CheckpointError for options and
    words that do not fit. Weights are not read.
    """
    if is_pooling_model(model_class, vllm_config):
        return model_class
    origin = classifier_origin(vllm_config)
    if vllm_config.hf_config["architectures"][0].endswith("ForTokenClassification"):
        return subclass(TokenClassifier, model_class, "ForTokenClassification", origin=origin)
    return subclass(SequenceClassifier, model_class, "ForSequenceClassification", origin=origin)
