"""Whether requests' hints have an effect."""

from __future__ import annotations

from typing import Any

from toolkit_lm.config import VllmConfig

_NAMES = ("prefix_retention", "toolkit_lm_prefix_retention")
"""Names of the plugin: installed, and given from code."""


def is_enabled(config: VllmConfig) -> bool:
    """Whether the plugin's options ask for it."""
    options: dict[str, Any] = {}
    for name in _NAMES:
        options |= config.plugins.plugin_option.get(name, {})
    return str(options.get("enabled", "")).lower() in ("true", "1", "on", "yes")
