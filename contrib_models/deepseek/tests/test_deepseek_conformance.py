"""The families through the whole engine: mixed lengths, a pool that makes it preempt, chunked
prefill, ranks, weight errors."""

from deepseek_families import (
    GLM,
    GLM45,
    KIMI,
    LONGCAT,
    MINICPM3,
    V2,
    V3,
    make_glm,
    make_glm45,
    make_kimi,
    make_longcat,
    make_minicpm3,
    make_v2,
    make_v3,
)
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


class TestGlm4MoeLite(TransformersConformance):
    variants = GLM
    tensor_parallel_sizes = (2,)

    def make_hf_model(self, **variant):
        return make_glm(**variant)


class TestGlm4Moe(TransformersConformance):
    variants = GLM45
    tensor_parallel_sizes = (2,)

    def make_hf_model(self, **variant):
        return make_glm45(**variant)


class TestMiniCPM3(TransformersConformance):
    variants = MINICPM3
    tensor_parallel_sizes = (2,)

    def make_hf_model(self, **variant):
        return make_minicpm3(**variant)


class TestLongcatFlash(TransformersConformance):
    variants = LONGCAT
    tensor_parallel_sizes = (2,)

    def make_hf_model(self, **variant):
        return make_longcat(**variant)


class TestKimiLinear(TransformersConformance):
    variants = KIMI
    tensor_parallel_sizes = (2,)

    def make_hf_model(self, **variant):
        return make_kimi(**variant)
