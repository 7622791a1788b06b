"""Attention on NVIDIA GPUs by FlashAttention: of the package flash_attn, or of torch."""

from __future__ import annotations

from toolkit_lm.plugin import AttentionBackendRegistry, hookimpl


@hookimpl
def toolkit_register_attention_backends(backends: AttentionBackendRegistry) -> None:
    # Below the reference until a GPU has run its whole kit: for those who ask for it by name.
    backends.add("flash_attn", "toolkit_lm_flash_attn.backend:FlashAttnBackend", priority=-2)
