"""The conformance kit: with the masks alone anywhere, with the kernels on a GPU."""

import pytest
from materialized_masks import backend_of
from toolkit_lm_devkit import AttentionBackendConformance
from toolkit_lm_xformers import kernel
from toolkit_lm_xformers.backend import XformersBackend

if kernel.missing() is not None:
    pytest.skip(str(kernel.missing()), allow_module_level=True)


class TestGathering(AttentionBackendConformance):
    backend = backend_of(None)


class TestPaging(AttentionBackendConformance):
    backend = backend_of(16)


@pytest.mark.skipif(kernel.refusal() is not None, reason=str(kernel.refusal()))
class TestXformers(AttentionBackendConformance):
    backend = XformersBackend
    device = "cuda"
    factors = {**AttentionBackendConformance.factors, "block_size": [1, 16, 17, 256]}
