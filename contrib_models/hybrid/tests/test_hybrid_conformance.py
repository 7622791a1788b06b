"""Every family through the whole engine: mixed lengths, a pool that makes it preempt, chunked
prefill, snapshots, shards, weight errors."""

from hybrid_families import VARIANTS, make_model
from toolkit_lm_devkit import TransformersConformance


class HybridConformance(TransformersConformance):
    architecture = ""

    def make_hf_model(self, **variant):
        return make_model(self.architecture, variant)


class TestQwen3Next(HybridConformance):
    architecture = "Qwen3NextForCausalLM"
    variants = VARIANTS[architecture]


class TestQwen35(HybridConformance):
    architecture = "Qwen3_5ForCausalLM"
    variants = VARIANTS[architecture]


class TestQwen35Moe(HybridConformance):
    architecture = "Qwen3_5MoeForCausalLM"
    variants = VARIANTS[architecture]
