"""The plugin's own flags in a command line."""

from __future__ import annotations

from toolkit_lm_commands import PluginFlags

translate_flags = PluginFlags(
    "lora", {"--lora-dir": "folder", "--lora-pin": "pinned", "--lora-merge": "merge"}
)
