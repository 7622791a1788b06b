"""The plugin's own flags in a command line."""

from __future__ import annotations

from toolkit_lm_commands import PluginFlags

translate_flags = PluginFlags(
    "kv_disk",
    {
        "--kv-cache-dir": "dir",
        "--kv-cache-disk": "disk",
        "--kv-cache-host": "host",
        "--kv-cache-write": "write",
        "--kv-cache-key-file": "key_file",
    },
)
