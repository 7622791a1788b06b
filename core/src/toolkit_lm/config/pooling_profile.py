"""What a checkpoint's own files say of pooling, as data: it is read once, and crosses to every
process of an engine."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field


class PoolingProfile(Struct, frozen=True, kw_only=True):
    """What an engine is made by, and the rest for whoever makes poolers and reads texts."""

    is_complete: bool = False
    """The files list all that is done. False: the model class says the rest."""
    max_tokens: int | None = None
    """Tokens of the longest input, special tokens included; None: not said."""
    scores: bool = False
    """Of a complete one: it makes scores of a language model's logits, and not embeddings."""
    details: dict[str, Any] = field(default_factory=dict)
    """toolkit_lm_poolers.details.PoolingDetails as plain data."""
