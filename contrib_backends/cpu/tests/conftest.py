"""The kernels that this processor can run."""

from __future__ import annotations

import pytest
import torch
from toolkit_lm_cpu import library
from toolkit_lm_cpu.library import KERNELS, usable_types


@pytest.fixture(params=["avx2", "best"])
def isa(request, monkeypatch) -> str:
    """The oldest instructions that the kernels run on, and the best that the processor has."""
    if library.refusal() is not None:
        pytest.skip(str(library.refusal()))
    if request.param == "avx2":
        for dtype, number in KERNELS["avx2"].items():
            monkeypatch.setitem(usable_types(), dtype, number)
    return request.param


@pytest.fixture(
    params=[(isa, dtype) for isa, types in KERNELS.items() for dtype in types],
    ids=lambda kernel: f"{kernel[0]}-{kernel[1]}",
)
def dtype(request, monkeypatch) -> torch.dtype:
    """The dtype of each kernel, which is then the one that computes it."""
    isa, dtype = request.param
    if not library._kernels.supports(isa):
        pytest.skip(f"the processor lacks {isa}")
    monkeypatch.setitem(usable_types(), dtype, KERNELS[isa][dtype])
    return dtype
