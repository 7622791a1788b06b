"""Platform: kind of the device that engines choose where the option `device` is auto."""

from __future__ import annotations

import importlib
import platform
from typing import Any


class Platform:
    """vLLM's `current_platform`. torch is imported when it is asked."""

    @property
    def device_type(self) -> str:
        """ "cuda" or "cpu", as torch names devices."""
        return "cuda" if self._torch.cuda.is_available() else "cpu"

    @property
    def device_name(self) -> str:
        """ "cuda", "rocm" or "cpu"."""
        return "rocm" if self.is_rocm() else self.device_type

    def is_cuda(self) -> bool:
        """Whether the device is an NVIDIA GPU."""
        return self.is_cuda_alike() and self._torch.version.hip is None

    def is_rocm(self) -> bool:
        """Whether the device is an AMD GPU."""
        return self.is_cuda_alike() and self._torch.version.hip is not None

    def is_cuda_alike(self) -> bool:
        """Whether torch names the device "cuda"."""
        return self.device_type == "cuda"

    def is_cpu(self) -> bool:
        """Whether the device is the CPU."""
        return self.device_type == "cpu"

    def is_tpu(self) -> bool:
        """False: engines run on no TPU."""
        return False

    def is_xpu(self) -> bool:
        """False: engines run on no Intel GPU."""
        return False

    def get_device_name(self, device_id: int = 0) -> str:
        """Name of a GPU, or of the CPU's architecture."""
        if self.is_cpu():
            return platform.machine()
        return str(self._torch.cuda.get_device_name(device_id))

    @property
    def _torch(self) -> Any:
        return importlib.import_module("torch")


current_platform = Platform()
