"""The plugin's own flags in a command line."""

from __future__ import annotations

from toolkit_lm_commands import PluginFlags

translate_flags = PluginFlags(
    "kv_redis",
    {
        "--kv-cache-redis": "url",
        "--kv-cache-redis-password-file": "password_file",
        "--kv-cache-redis-ttl": "ttl",
    },
)
