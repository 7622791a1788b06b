"""A small trained chat model, embedded: `toolkit serve tiny`."""

from __future__ import annotations

from toolkit_lm.config import VllmConfig
from toolkit_lm.plugin import CheckpointRegistry, hookimpl

_KV_CACHE_MEMORY = "64MiB"


@hookimpl
def toolkit_register_checkpoints(checkpoints: CheckpointRegistry) -> None:
    checkpoints.add("tiny", "toolkit_lm_tiny:checkpoint")


@hookimpl
def toolkit_configure(config: VllmConfig) -> VllmConfig | None:
    """A model this small needs no gigabytes of KV cache: 64 MiB, unless the user says otherwise."""
    cache = config.cache
    if config.model.model != "tiny" or cache.kv_cache_memory != "auto" or cache.num_kv_blocks is not None:
        return None
    return config.replace(kv_cache_memory=_KV_CACHE_MEMORY)
