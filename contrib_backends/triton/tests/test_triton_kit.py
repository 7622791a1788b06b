"""The conformance kit: on a GPU, or by Triton's interpreter, which `test_interpreter.py` runs these
tests with."""

import os

import pytest
import torch
from toolkit_lm_devkit import AttentionBackendConformance, KernelsConformance
from toolkit_lm_triton.backend import TritonBackend
from toolkit_lm_triton.device import interprets, refusal
from toolkit_lm_triton.layers import TritonKernels

DEVICE = "cpu" if interprets() else "cuda"
DTYPES = [
    dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    if refusal(DEVICE, str(dtype).removeprefix("torch.")) is None
]
NUM_ROWS = 6 if interprets() and "TRITON_TESTS_WHOLE" not in os.environ else None
pytestmark = pytest.mark.skipif(not DTYPES, reason=str(refusal(DEVICE, "float32")))


class TestTriton(AttentionBackendConformance):
    backend = TritonBackend
    device = DEVICE


class TestTritonKernels(KernelsConformance):
    kernels = TritonKernels
    device = DEVICE
    dtypes = DTYPES
    # Products are torch's.
    bitwise = False

    @classmethod
    def rows(cls, size, dtype):
        """Fewer for the interpreter, which runs a program for each row, one after another."""
        return super().rows(size, dtype)[:NUM_ROWS]
