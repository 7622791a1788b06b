"""Checkpoint: what was read from a checkpoint folder."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from toolkit_lm.config.pooling_profile import PoolingProfile


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
