"""Small trained models, embedded: `tiny`, which chats, `tiny-dates`, which reads dates,
`tiny-tools`, which calls tools, and `tiny-vision`, which looks at pictures.
"""

from __future__ import annotations

from toolkit_lm.config import VllmConfig
from toolkit_lm.plugin import CheckpointRegistry, hookimpl

_CHECKPOINTS = {
    "tiny": "checkpoint",
    "tiny-dates": "checkpoint_dates",
    "tiny-tools": "checkpoint_tools",
    "tiny-vision": "checkpoint_vision",
}
_DRAFTS = {"tiny-draft": "checkpoint_draft", "tiny-eagle": "checkpoint_eagle"}
"""Checkpoints that draft for `tiny`."""
_KV_CACHE_MEMORY = "64MiB"


@hookimpl
def toolkit_register_checkpoints(checkpoints: CheckpointRegistry) -> None:
    for name, folder in (_CHECKPOINTS | _DRAFTS).items():
        checkpoints.add(name, f"toolkit_lm_tiny:{folder}")


@hookimpl
def toolkit_configure(config: VllmConfig) -> VllmConfig | None:
    """Models this small need no gigabytes of KV cache: 64 MiB, unless the user says otherwise."""
    cache = config.cache
    if (
        config.model.model not in _CHECKPOINTS
        or cache.kv_cache_memory != "auto"
        or cache.num_kv_blocks is not None
    ):
        return None
    return config.replace(kv_cache_memory=_KV_CACHE_MEMORY)
