"""The attention backend for processors with AVX-512: encoder layers, in kernels of its own."""

from __future__ import annotations

from llm_toolkit.plugin import AttentionBackendRegistry, hookimpl


@hookimpl
def toolkit_register_attention_backends(backends: AttentionBackendRegistry) -> None:
    backends.add("cpu", "llm_toolkit_cpu.backend:CpuBackend", priority=10)
