"""The conformance kit on a GPU, and on a CPU with quantized caches.

Without them `test_attention_masks.py` and the kit's own tests have the CPU's.
"""

import pytest
import torch
from toolkit_lm_devkit import AttentionBackendConformance
from toolkit_lm_devkit.attention import FACTORS
from toolkit_lm_devkit.attention_step import CACHES
from toolkit_lm_sdpa.backend import SdpaBackend


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")
class TestSdpaOnAGpu(AttentionBackendConformance):
    backend = SdpaBackend
    device = "cuda"


class TestQuantizedCaches(AttentionBackendConformance):
    backend = SdpaBackend
    factors = FACTORS | {"kind": ["decoder", "cross"], "cache": list(CACHES)}
