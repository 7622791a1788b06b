"""Kernels in Triton for GPUs: an attention backend for layers of all types, and what other layers
compute with."""

from __future__ import annotations

from toolkit_lm.plugin import AttentionBackendRegistry, KernelsRegistry, hookimpl


@hookimpl
def toolkit_register_attention_backends(backends: AttentionBackendRegistry) -> None:
    # Below the reference until a GPU has run its whole kit: for those who ask for it by name.
    backends.add("triton", "toolkit_lm_triton.backend:TritonBackend", priority=-5)


@hookimpl
def toolkit_register_kernels(kernels: KernelsRegistry) -> None:
    kernels.add("triton", "toolkit_lm_triton.layers:TritonKernels", priority=-5)
