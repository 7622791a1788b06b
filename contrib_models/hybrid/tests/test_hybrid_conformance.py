"""Every family through the whole engine: mixed lengths, a pool that makes it preempt, chunked
prefill, snapshots, shards, weight errors."""

import pytest
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


class TestBamba(HybridConformance):
    architecture = "BambaForCausalLM"
    variants = VARIANTS[architecture]


class TestFalconH1(HybridConformance):
    architecture = "FalconH1ForCausalLM"
    variants = VARIANTS[architecture]


class TestGraniteMoeHybrid(HybridConformance):
    architecture = "GraniteMoeHybridForCausalLM"
    variants = VARIANTS[architecture]

    def test_layers_know_what_the_checkpoint_calls_their_weights(self, subjects, variant):
        """No expert has a name in checkpoints: one tensor holds all of a layer's."""
        known = super().test_layers_know_what_the_checkpoint_calls_their_weights
        if variant == "experts":
            with pytest.raises(AssertionError, match=r"mlp\.routed\.experts\.0"):
                known(subjects, variant)
        else:
            known(subjects, variant)


class TestLfm2(HybridConformance):
    architecture = "Lfm2ForCausalLM"
    variants = VARIANTS[architecture]


class TestLfm2Moe(HybridConformance):
    architecture = "Lfm2MoeForCausalLM"
    variants = VARIANTS[architecture]


class TestLfm3(HybridConformance):
    architecture = "Lfm3ForCausalLM"
    variants = VARIANTS[architecture]

    def scaled_models(self, hf_model):
        """Heads rotated whole: transformers rotates a share of each by "proportional" alone."""
        hf_model.config.rope_parameters["full_attention"]["partial_rotary_factor"] = 1.0
        return super().scaled_models(hf_model)


class TestOlmoHybrid(HybridConformance):
    architecture = "OlmoHybridForCausalLM"
    variants = VARIANTS[architecture]


class TestFalconMamba(HybridConformance):
    architecture = "FalconMambaForCausalLM"
    variants = VARIANTS[architecture]


class TestJamba(HybridConformance):
    architecture = "JambaForCausalLM"
    variants = VARIANTS[architecture]


class TestMamba(HybridConformance):
    architecture = "MambaForCausalLM"
    variants = VARIANTS[architecture]


class TestMamba2(HybridConformance):
    architecture = "Mamba2ForCausalLM"
    variants = VARIANTS[architecture]


class TestNemotronH(HybridConformance):
    architecture = "NemotronHForCausalLM"
    variants = VARIANTS[architecture]


class TestRecurrentGemma(HybridConformance):
    architecture = "RecurrentGemmaForCausalLM"
    variants = VARIANTS[architecture]


class TestRwkv(HybridConformance):
    architecture = "RwkvForCausalLM"
    variants = VARIANTS[architecture]


class TestZamba2(HybridConformance):
    architecture = "Zamba2ForCausalLM"
    variants = VARIANTS[architecture]
