"""All families through the whole engine: mixed lengths, a pool that makes it preempt, chunked
prefill, shards, weight errors."""

from moe_families import GPT_OSS, MIXTRAL, QWEN3_MOE, make_gpt_oss, make_mixtral, make_qwen3_moe
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
