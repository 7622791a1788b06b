"""Attention on NVIDIA GPUs by the kernels of xFormers."""

from __future__ import annotations

from toolkit_lm.plugin import AttentionBackendRegistry, hookimpl


@hookimpl
def toolkit_register_attention_backends(backends: AttentionBackendRegistry) -> None:
    # Below the reference: no GPU has run it in the tests, so that it is for those who ask for it by
    # name.
    backends.add("xformers", "toolkit_lm_xformers.backend:XformersBackend", priority=-4)
