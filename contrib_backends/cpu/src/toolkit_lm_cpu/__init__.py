"""CPU kernels: an attention backend for all types of layers, and kernels of the other layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from toolkit_lm.config import VllmConfig
from toolkit_lm.plugin import AttentionBackendRegistry, KernelsRegistry, hookimpl


@hookimpl
def toolkit_register_attention_backends(backends: AttentionBackendRegistry) -> None:
    backends.add("cpu", "toolkit_lm_cpu.backend:CpuBackend", priority=10)


@hookimpl
def toolkit_register_kernels(kernels: KernelsRegistry) -> None:
    kernels.add("cpu", "toolkit_lm_cpu.layers:CpuKernels", priority=10)


@hookimpl(optionalhook=True)
def toolkit_explain(config: VllmConfig) -> Mapping[str, Sequence[str]] | None:
    from toolkit_lm_cpu.library import refusal

    if config.device.device != "cpu" or config.device.kernels == "torch" or refusal() is not None:
        return None
    from toolkit_lm_cpu.huge_pages import describe

    return {"huge pages": [describe()]}
