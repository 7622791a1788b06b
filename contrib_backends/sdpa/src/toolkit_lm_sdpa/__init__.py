"""The reference attention backend: exact, on any device, for all attention types of the
contract."""

from __future__ import annotations

from toolkit_lm.plugin import AttentionBackendRegistry, hookimpl


@hookimpl
def toolkit_register_attention_backends(backends: AttentionBackendRegistry) -> None:
    backends.add("sdpa", "toolkit_lm_sdpa.backend:SdpaBackend", priority=0)
