"""DistilBERT (Sanh et al. 2019): BERT with half the layers, under other names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from toolkit_lm.model import HFConfig

from toolkit_lm_encoder.bert import BertEncoder, BertShape
from toolkit_lm_encoder.encoder import Renames
from toolkit_lm_encoder.heads import OUT_PROJ, Embedder, SequenceClassifier, TokenClassifier

EPS = 1e-12


class DistilBertEncoder(BertEncoder):
    """DistilBERT without a head."""

    renames: ClassVar[Renames] = (
        (r"^distilbert\.", ""),
        (r"^transformer\.", "encoder."),
        (r"\.attention\.q_lin\.", ".attention.self.query."),
        (r"\.attention\.k_lin\.", ".attention.self.key."),
        (r"\.attention\.v_lin\.", ".attention.self.value."),
        (r"\.attention\.out_lin\.", ".attention.output.dense."),
        (r"\.sa_layer_norm\.", ".attention.output.LayerNorm."),
        (r"\.ffn\.lin1\.", ".intermediate.dense."),
        (r"\.ffn\.lin2\.", ".output.dense."),
        (r"\.output_layer_norm\.", ".output.LayerNorm."),
    )
    ignored: ClassVar[Sequence[str]] = (
        *BertEncoder.ignored,
        r"^vocab_(transform|layer_norm|projector)\.",
    )

    @classmethod
    def shape(cls, config: HFConfig) -> BertShape:
        return BertShape(
            hidden_size=config.require("dim", int),
            num_layers=config.require("n_layers", int),
            num_heads=config.require("n_heads", int),
            intermediate_size=config.require("hidden_dim", int),
            activation=config.get("activation", str, "gelu"),
            eps=EPS,
            max_positions=config.require("max_position_embeddings", int),
        )


class DistilBertModel(Embedder, DistilBertEncoder):
    pass


class DistilBertForSequenceClassification(SequenceClassifier, DistilBertEncoder):
    activation = "relu"
    renames = (*DistilBertEncoder.renames, OUT_PROJ, (r"^pre_classifier\.", "classifier.dense."))


class DistilBertForTokenClassification(TokenClassifier, DistilBertEncoder):
    renames = (*DistilBertEncoder.renames, OUT_PROJ)
