"""The conformance kit: with a stand-in for the kernel anywhere, with the kernel on a GPU."""

import pytest
from stand_in_kernel import GATHERING, PAGING, backend_of
from toolkit_lm_devkit import AttentionBackendConformance
from toolkit_lm_flash_attn.backend import FlashAttnBackend
from toolkit_lm_flash_attn.kernel import refusal


class TestGathering(AttentionBackendConformance):
    backend = backend_of(GATHERING)


class TestPaging(AttentionBackendConformance):
    backend = backend_of(PAGING)


@pytest.mark.skipif(refusal() is not None, reason=str(refusal()))
class TestFlashAttn(AttentionBackendConformance):
    backend = FlashAttnBackend
    device = "cuda"
    factors = {**AttentionBackendConformance.factors, "block_size": [1, 16, 17, 256]}
