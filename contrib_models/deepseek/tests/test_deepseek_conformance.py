"""The families through the whole engine: mixed lengths, a pool that makes it preempt, chunked
prefill, ranks, weight errors."""

from deepseek_families import (
    DSA,
    GLM,
    GLM45,
    KIMI,
    LONGCAT,
    MINICPM3,
    V2,
    V3,
    V32,
    make_dsa,
    make_glm,
    make_glm45,
    make_kimi,
    make_longcat,
    make_minicpm3,
    make_v2,
    make_v3,
    make_v32,
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


class TestDeepseekV32(TransformersConformance):
    variants = V32
    tensor_parallel_sizes = (2,)

    def make_hf_model(self, **variant):
        return make_v32(**variant)


class TestGlmMoeDsa(TransformersConformance):
    variants = DSA
    tensor_parallel_sizes = (2,)

    def make_hf_model(self, **variant):
        return make_dsa(**variant)

    def must_preempt(self, specs):
        """Layers with an indexer's key and those without have pools of their own, of as many blocks
        each."""
        return len(specs) == 1 and super().must_preempt(specs)


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
