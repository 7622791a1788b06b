"""The conformance kit."""

import pytest
import torch
from toolkit_lm_devkit import AttentionBackendConformance
from toolkit_lm_flex.backend import FlexBackend


class TestFlex(AttentionBackendConformance):
    backend = FlexBackend


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
class TestFlexOnAGpu(AttentionBackendConformance):
    backend = FlexBackend
    device = "cuda"
