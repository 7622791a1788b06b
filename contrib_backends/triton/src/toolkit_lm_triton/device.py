"""Devices and dtypes on which the kernels can run. Nothing here imports Triton."""

from __future__ import annotations

import importlib.util
import os

import torch

DTYPES = ("float32", "bfloat16", "float16")
_INTERPRETED = ("float32", "float16")
FLOAT8_CAPABILITY = 8, 9
"""Compute capability of the first GPUs that have float8."""
LAUNCH = {"enable_fp_fusion": True}
"""Options of every kernel launch. Products and sums are rounded together: Triton 3.9 warns if this
is not stated, and 3.10 has another default."""


def refusal(device: str, dtype: str) -> str | None:
    """Why no kernel can run on a device of that type, in that dtype; None when one can."""
    if dtype not in DTYPES:
        return f"no kernel for {dtype}, only for {', '.join(DTYPES)}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed: pip install 'toolkit-lm-triton[kernels]'"
    if device == "cuda":
        return None if torch.cuda.is_available() else "no GPU is there"
    if device != "cpu":
        return f"no kernel for device {device}, only for cuda"
    if not interprets():
        return (
            "no kernel for device cpu, only for cuda; Triton's interpreter, for tests, is asked "
            "for by TRITON_INTERPRET=1"
        )
    if dtype not in _INTERPRETED:
        return (
            f"Triton's interpreter computes {' and '.join(_INTERPRETED)} only, and gives wrong "
            f"numbers in {dtype}"
        )
    return None


def float8_refusal(device: str) -> str | None:
    """Why no kernel can convert numbers to float8 on a device of that type; None when one can."""
    if device != "cuda" or multiplies_float8(torch.device(device)):
        return None
    number = ".".join(map(str, FLOAT8_CAPABILITY))
    return f"float8 needs a GPU of compute capability {number} or above"


def multiplies_float8(device: torch.device) -> bool:
    """Whether a device has products of float8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY


def interprets() -> bool:
    """Whether Triton interprets kernels, on a CPU. It reads the variable when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
