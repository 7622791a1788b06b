"""What was read from a checkpoint folder."""

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


class Checkpoint(Struct, frozen=True, kw_only=True):
    """What was read from a checkpoint folder; derived, not options."""

    path: str
    """The folder of config.json, tokenizer and the like."""
    architecture: str
    """The model class's key in the registry: the entry of config.json's `architectures` that has a
    class, or a fallback's name."""
    hf_config: dict[str, Any]
    """config.json; for a multimodal checkpoint the whole of it."""
    source: str = ""
    """What holds the weights, where it is not that folder: a file."""
    generation_config: dict[str, Any] = field(default_factory=dict)
    pooling_profile: PoolingProfile | None = None
    """What the files beside it say of pooling; None: there are none that do."""
