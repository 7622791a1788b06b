"""CPU kernels: an attention backend for all types of layers, and kernels of the other layers."""

from __future__ import annotations

from toolkit_lm.plugin import AttentionBackendRegistry, KernelsRegistry, hookimpl


@hookimpl
def toolkit_register_attention_backends(backends: AttentionBackendRegistry) -> None:
    backends.add("cpu", "toolkit_lm_cpu.backend:CpuBackend", priority=10)


@hookimpl
def toolkit_register_kernels(kernels: KernelsRegistry) -> None:
    kernels.add("cpu", "toolkit_lm_cpu.layers:CpuKernels", priority=10)
