"""The reference attention backend: exact, on any device, for all attention types of the contract."""

from __future__ import annotations

from llm_toolkit.plugin import AttentionBackendRegistry, hookimpl


@hookimpl
def toolkit_register_attention_backends(backends: AttentionBackendRegistry) -> None:
    backends.add("sdpa", "llm_toolkit_sdpa.backend:SdpaBackend", priority=0)
