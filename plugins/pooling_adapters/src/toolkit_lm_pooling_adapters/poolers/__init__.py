"""Poolers: from the hidden states of a prompt's tokens to an embedding, classes or scores."""

from toolkit_lm_pooling_adapters.poolers.factories import (
    classification_pooler,
    embedding_pooler,
    num_labels_of,
    token_classification_pooler,
)
from toolkit_lm_pooling_adapters.poolers.heads import ClassifierHead, EmbeddingHead, Head
from toolkit_lm_pooling_adapters.poolers.methods import (
    METHODS,
    Concatenated,
    PoolingMethod,
    Segments,
)
from toolkit_lm_pooling_adapters.poolers.poolers import (
    AllPooler,
    ClassifierPooler,
    DispatchPooler,
    SimplePooler,
    StepPooler,
)
from toolkit_lm_pooling_adapters.poolers.rows import PoolingMetadata, PoolingRow, RowPooler

__all__ = [
    "METHODS",
    "AllPooler",
    "ClassifierHead",
    "ClassifierPooler",
    "Concatenated",
    "DispatchPooler",
    "EmbeddingHead",
    "Head",
    "PoolingMetadata",
    "PoolingMethod",
    "PoolingRow",
    "RowPooler",
    "Segments",
    "SimplePooler",
    "StepPooler",
    "classification_pooler",
    "embedding_pooler",
    "num_labels_of",
    "token_classification_pooler",
]
