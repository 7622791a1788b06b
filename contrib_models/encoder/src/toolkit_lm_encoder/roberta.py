"""RoBERTa (Liu et al. 2019), XLM-RoBERTa and CamemBERT: BERT whose positions begin after that of
padding."""

from __future__ import annotations

from dataclasses import replace

from toolkit_lm.model import HFConfig

from toolkit_lm_encoder.bert import BertEncoder, BertShape
from toolkit_lm_encoder.encoder import with_defaults
from toolkit_lm_encoder.heads import OUT_PROJ, Embedder, SequenceClassifier, TokenClassifier


class RobertaEncoder(BertEncoder):
    """RoBERTa without a head."""

    @classmethod
    def shape(cls, config: HFConfig) -> BertShape:
        shape = super().shape(with_defaults(config, {"layer_norm_eps": 1e-5, "type_vocab_size": 1}))
        return replace(shape, position_offset=config.get("pad_token_id", int, 1) + 1)


class RobertaModel(Embedder, RobertaEncoder):
    pass


class RobertaForSequenceClassification(SequenceClassifier, RobertaEncoder):
    pass


class RobertaForTokenClassification(TokenClassifier, RobertaEncoder):
    renames = (*RobertaEncoder.renames, OUT_PROJ)
