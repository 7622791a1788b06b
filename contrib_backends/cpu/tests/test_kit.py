"""The conformance kit, for attention and for what layers compute with."""

import pytest
import torch
from toolkit_lm_cpu.backend import CpuBackend
from toolkit_lm_cpu.layers import CpuKernels
from toolkit_lm_cpu.library import refusal
from toolkit_lm_devkit import AttentionBackendConformance, KernelsConformance

if refusal() is not None:
    pytest.skip(str(refusal()), allow_module_level=True)


@pytest.mark.usefixtures("isa")
class TestCpu(AttentionBackendConformance):
    backend = CpuBackend


@pytest.mark.usefixtures("isa")
class TestCpuKernels(KernelsConformance):
    kernels = CpuKernels
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    # Plain torch multiplies what has an odd number of inputs.
    sizes = (64, 48, 6)
