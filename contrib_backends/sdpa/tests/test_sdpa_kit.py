"""The conformance kit on a GPU. `test_attention_masks.py` and the kit's own tests have the
CPU's."""

import pytest
import torch
from toolkit_lm_devkit import AttentionBackendConformance
from toolkit_lm_sdpa.backend import SdpaBackend


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")
class TestSdpaOnAGpu(AttentionBackendConformance):
    backend = SdpaBackend
    device = "cuda"
