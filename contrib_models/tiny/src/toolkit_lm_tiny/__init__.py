"""Small trained models, embedded: `toolkit serve tiny`, which chats, and `tiny-dates`, an encoder-decoder that reads dates."""

from __future__ import annotations

from toolkit_lm.config import VllmConfig
from toolkit_lm.plugin import CheckpointRegistry, hookimpl

_KV_CACHE_MEMORY = "64MiB"


@hookimpl
def toolkit_register_checkpoints(checkpoints: CheckpointRegistry) -> None:
    checkpoints.add("tiny", "toolkit_lm_tiny:checkpoint")
    checkpoints.add("tiny-dates", "toolkit_lm_tiny:checkpoint_dates")


@hookimpl
def toolkit_configure(config: VllmConfig) -> VllmConfig | None:
    """Models this small need no gigabytes of KV cache: 64 MiB, unless the user says otherwise."""
    cache = config.cache
    if config.model.model not in ("tiny", "tiny-dates") or cache.kv_cache_memory != "auto" or cache.num_kv_blocks is not None:
        return None
    return config.replace(kv_cache_memory=_KV_CACHE_MEMORY)
