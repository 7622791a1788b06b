"""Data that were read from a checkpoint folder."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field


class PoolingProfile(Struct, frozen=True, kw_only=True):
    """Pooling settings of a checkpoint: those that the engine needs, and `details` for makers of
    poolers and readers of texts."""

    is_complete: bool = False
    """The files describe the whole pooling. False: the model class supplies the rest."""
    max_tokens: int | None = None
    """Most tokens of an input, special tokens included; None: not stated."""
    scores: bool = False
    """The profile is complete, and turns a language model's logits into scores instead of
    embeddings."""
    details: dict[str, Any] = field(default_factory=dict)
    """toolkit_lm_poolers.details.PoolingDetails as plain data."""


class Checkpoint(Struct, frozen=True, kw_only=True):
    """Data that were read from a checkpoint folder. They are derived values, not options."""

    path: str
    """The folder of config.json, the tokenizer and further files."""
    architecture: str
    """The model class's key in the registry: the entry of config.json's `architectures` that has a
    class, or a fallback's name."""
    hf_config: dict[str, Any]
    """The whole config.json, also for a multimodal checkpoint."""
    source: str = ""
    """The file that holds the weights, if they are not in the folder."""
    generation_config: dict[str, Any] = field(default_factory=dict)
    pooling_profile: PoolingProfile | None = None
    """Pooling settings from other files of the folder; None: there are none."""
