"""Where the kernels can run. Nothing here imports Triton."""

from __future__ import annotations

import importlib.util
import os

import torch

DTYPES = ("float32", "bfloat16", "float16")
_INTERPRETED = ("float32", "float16")
LAUNCH = {"enable_fp_fusion": True}
"""Of every kernel. Triton 3.9 warns where it is not said, and 3.10 has another default: products
and sums are rounded together."""


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


def interprets() -> bool:
    """Whether Triton interprets kernels, on a CPU. It reads the variable when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
