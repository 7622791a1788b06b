"""Pooling: from the hidden states of a sequence's tokens to an embedding, classes or scores.

The names are resolved when they are used: a front that reads what sentence-transformers says of a checkpoint needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit_lm._lazy import resolver

if TYPE_CHECKING:
    from toolkit_lm.pooling.artifact_metadata import read_artifact_metadata
    from toolkit_lm.pooling.contract import Pooler, PoolingMetadata, PoolingRow
    from toolkit_lm.pooling.factories import classification_pooler, embedding_pooler, num_labels_of, token_classification_pooler
    from toolkit_lm.pooling.finish import ClassifierHead, EmbeddingHead, Head
    from toolkit_lm.pooling.late_interaction import Side, read_sides
    from toolkit_lm.pooling.limits import check_params, hidden_size
    from toolkit_lm.pooling.methods import METHODS, Concatenated, PoolingMethod, Segments
    from toolkit_lm.pooling.poolers import AllPooler, ClassifierPooler, DispatchPooler, SimplePooler, StepPooler
    from toolkit_lm.pooling.sentence_transformers import SentenceTransformersConfig, read_sentence_transformers
    from toolkit_lm.pooling.weight_names import stored_weights

_HOMES = {
    "artifact_metadata": ("read_artifact_metadata",),
    "contract": ("Pooler", "PoolingMetadata", "PoolingRow"),
    "factories": ("classification_pooler", "embedding_pooler", "num_labels_of", "token_classification_pooler"),
    "finish": ("ClassifierHead", "EmbeddingHead", "Head"),
    "late_interaction": ("Side", "read_sides"),
    "limits": ("check_params", "hidden_size"),
    "methods": ("METHODS", "Concatenated", "PoolingMethod", "Segments"),
    "poolers": ("AllPooler", "ClassifierPooler", "DispatchPooler", "SimplePooler", "StepPooler"),
    "sentence_transformers": ("SentenceTransformersConfig", "read_sentence_transformers"),
    "weight_names": ("stored_weights",),
}

__all__ = [
    "METHODS",
    "AllPooler",
    "ClassifierHead",
    "ClassifierPooler",
    "Concatenated",
    "DispatchPooler",
    "EmbeddingHead",
    "Head",
    "Pooler",
    "PoolingMetadata",
    "PoolingMethod",
    "PoolingRow",
    "Segments",
    "SentenceTransformersConfig",
    "Side",
    "SimplePooler",
    "StepPooler",
    "check_params",
    "classification_pooler",
    "embedding_pooler",
    "hidden_size",
    "num_labels_of",
    "read_artifact_metadata",
    "read_sentence_transformers",
    "read_sides",
    "stored_weights",
    "token_classification_pooler",
]

_resolve = resolver(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    return _resolve(name)


def __dir__() -> list[str]:
    return __all__
