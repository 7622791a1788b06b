"""The families through the whole engine: mixed lengths, a pool that makes it preempt, chunked
prefill, ranks, weight errors."""

from deepseek_families import V2, V3, make_v2, make_v3
from toolkit_lm_devkit import TransformersConformance


class TestDeepseekV2(TransformersConformance):
    variants = V2
    tensor_parallel_sizes = (2,)

    def make_hf_model(self, **variant):
        return make_v2(**variant)


class TestDeepseekV3(TransformersConformance):
    variants = V3
    tensor_parallel_sizes = (2,)

    def make_hf_model(self, **variant):
        return make_v3(**variant)
