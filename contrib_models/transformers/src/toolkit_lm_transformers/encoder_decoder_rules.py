"""Prompt rules of the fallback for encoder-decoder models. Needs no torch."""

from __future__ import annotations

from typing import ClassVar

from toolkit_lm_encdec.rules import UsualRules


class FallbackRules(UsualRules):
    """Rules of most models, in transformers' terms, by whatever key their encoder states its
    length."""

    encoder_length_keys: ClassVar[tuple[str, ...]] = (
        "max_encoder_position_embeddings",
        *UsualRules.encoder_length_keys,
        "encoder.max_position_embeddings",
        "encoder.n_positions",
    )
