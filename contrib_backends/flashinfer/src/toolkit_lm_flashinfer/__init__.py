"""Attention on NVIDIA GPUs by FlashInfer."""

from __future__ import annotations

from toolkit_lm.plugin import AttentionBackendRegistry, hookimpl


@hookimpl
def toolkit_register_attention_backends(backends: AttentionBackendRegistry) -> None:
    # Below the reference: no GPU has run it in the tests, so that it is for those who ask for it by
    # name.
    backends.add("flashinfer", "toolkit_lm_flashinfer.backend:FlashInferBackend", priority=-7)
