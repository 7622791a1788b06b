"""The attention backend for processors with AVX-512: encoder layers, in kernels of its own."""

from __future__ import annotations

from toolkit_lm.plugin import AttentionBackendRegistry, hookimpl


@hookimpl
def toolkit_register_attention_backends(backends: AttentionBackendRegistry) -> None:
    backends.add("cpu", "toolkit_lm_cpu.backend:CpuBackend", priority=10)
