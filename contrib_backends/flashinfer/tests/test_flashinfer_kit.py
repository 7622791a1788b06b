"""The conformance kit: with a stand-in for FlashInfer anywhere, with FlashInfer on a GPU."""

import pytest
from flashinfer_stand_in import StandInBackend
from toolkit_lm_devkit import AttentionBackendConformance
from toolkit_lm_flashinfer.backend import FlashInferBackend, missing


class TestStandIn(AttentionBackendConformance):
    backend = StandInBackend


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
class TestFlashInfer(AttentionBackendConformance):
    backend = FlashInferBackend
    device = "cuda"
    factors = {**AttentionBackendConformance.factors, "head_size": [64, 128, 256]}
