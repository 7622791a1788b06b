"""ELECTRA (Clark et al. 2020): BERT whose embeddings may be shorter than its hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from toolkit_lm.model import HFConfig

from toolkit_lm_encoder.bert import BertEncoder, BertShape
from toolkit_lm_encoder.encoder import Renames
from toolkit_lm_encoder.heads import OUT_PROJ, Embedder, SequenceClassifier, TokenClassifier


class ElectraEncoder(BertEncoder):
    """ELECTRA without a head."""

    renames: ClassVar[Renames] = (
        (r"^electra\.", ""),
        (r"^embeddings_project\.", "embeddings.projection."),
    )
    ignored: ClassVar[Sequence[str]] = (
        *BertEncoder.ignored,
        r"^(generator_predictions|generator_lm_head|discriminator_predictions)\.",
    )

    @classmethod
    def shape(cls, config: HFConfig) -> BertShape:
        shape = super().shape(config)
        size = config.get("embedding_size", int, 128)
        return replace(shape, embedding_size=None if size == shape.hidden_size else size)


class ElectraModel(Embedder, ElectraEncoder):
    takes_token_types = True


class ElectraForSequenceClassification(SequenceClassifier, ElectraEncoder):
    takes_token_types = True
    activation = "gelu"


class ElectraForTokenClassification(TokenClassifier, ElectraEncoder):
    takes_token_types = True
    renames = (*ElectraEncoder.renames, OUT_PROJ)
