"""The pluggy markers of hooks, and the version of the plugin contract."""

from __future__ import annotations

import pluggy

API_VERSION = "0.2"
"""Version of the plugin contract. A plugin pins it: `toolkit-lm-core>=0.2,<0.3`."""

PROJECT = "toolkit_lm"
"""Name of the pluggy project, and of the entry-point group."""

HOOK_PREFIX = "toolkit_"

hookspec = pluggy.HookspecMarker(PROJECT)
"""Marks the specification of a hook."""

hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's implementation of a hook."""
