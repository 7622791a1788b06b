"""The plugin's own flags in a command line."""

from __future__ import annotations

from toolkit_lm_commands import PluginFlags

translate_flags = PluginFlags(
    "kv_transfer",
    {
        "--kv-transfer-listen": "listen",
        "--kv-transfer-advertise": "advertise",
        "--kv-transfer-peers": "peers",
        "--kv-transfer-secret-file": "secret_file",
        "--kv-transfer-memory": "memory",
        "--kv-transfer-lease": "lease",
        "--kv-transfer-timeout": "timeout",
    },
)
