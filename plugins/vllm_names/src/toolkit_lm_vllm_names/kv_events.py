"""vLLM's kv_events_config, in options of the plugin kv_events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit_lm_vllm_names.values import parsed

_SAME = ("endpoint", "replay_endpoint", "buffer_steps", "hwm", "max_queue_size", "topic")
"""Keys that are options of the plugin by the same names."""
_NAMES = ("enable_kv_cache_events", "publisher", *_SAME)


def kv_events_config(value: Any) -> dict[str, Any]:
    """Converts a mapping, a class of vLLM's shape, or JSON. Raises ValueError."""
    found = parsed(value)
    if hasattr(found, "enable_kv_cache_events"):
        found = {name: getattr(found, name) for name in _NAMES if hasattr(found, name)}
    if not isinstance(found, Mapping):
        raise ValueError("it is a mapping, with enable_kv_cache_events.")
    if unknown := sorted(found.keys() - {*_NAMES}):
        raise ValueError(f"it has no key {unknown[0]!r}. Known: {', '.join(_NAMES)}.")
    if not found.get("enable_kv_cache_events") or found.get("publisher") == "null":
        return {}
    if (publisher := found.get("publisher") or "zmq") != "zmq":
        raise ValueError(f"publisher {publisher!r} is unknown: use 'zmq' or 'null'.")
    options = {name: found[name] for name in _SAME if found.get(name) is not None}
    return {"plugin_option": {"kv_events": {"enabled": True, **options}}}
