"""All families through the whole engine: mixed lengths, a pool that makes it preempt, chunked
prefill, shards, weight errors."""

from moe_families import (
    GEMMA4,
    GPT_OSS,
    LLAMA4,
    MIXTRAL,
    QWEN3_MOE,
    make_gemma4,
    make_gpt_oss,
    make_llama4,
    make_mixtral,
    make_qwen3_moe,
)
from toolkit_lm_devkit import TransformersConformance


class TestMixtral(TransformersConformance):
    variants = MIXTRAL

    def make_hf_model(self, **variant):
        return make_mixtral(**variant)


class TestQwen3Moe(TransformersConformance):
    variants = QWEN3_MOE

    def make_hf_model(self, **variant):
        return make_qwen3_moe(**variant)


class TestGptOss(TransformersConformance):
    variants = GPT_OSS

    def make_hf_model(self, **variant):
        return make_gpt_oss(**variant)


class TestGemma4(TransformersConformance):
    variants = GEMMA4

    def make_hf_model(self, **variant):
        return make_gemma4(**variant)


class TestLlama4(TransformersConformance):
    variants = LLAMA4

    def make_hf_model(self, **variant):
        return make_llama4(**variant)
