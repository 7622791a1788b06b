"""Every family through the whole engine: mixed lengths, a pool that makes it preempt, chunked
prefill, shards, weight errors."""

from decoder_families import VARIANTS, make_model
from toolkit_lm_devkit import TransformersConformance

# At least 259, for the tokenizer of the kit; neither two nor four ranks divide it.
VOCAB_SIZE = 273
# Shorter than some prompts, and long enough that sequences whose layers are all windowed do not fit
# the tight pool.
WINDOW = {"sliding_window": 40}
CHANGES = {
    ("MistralForCausalLM", "window"): WINDOW,
    ("Phi3ForCausalLM", "window"): WINDOW,
    # Without caps, scores of random weights are so large that the rounding of transformers comes to
    # 1e-4. These are half as large.
    ("Gemma2ForCausalLM", "no soft caps"): {"query_pre_attn_scalar": 120},
    ("Gemma3ForCausalLM", "two rotary embeddings"): {"query_pre_attn_scalar": 120},
}


def variants_of(architecture):
    return {
        name: {**fields, **CHANGES.get((architecture, name), {})}
        for name, fields in VARIANTS[architecture].items()
    }


def make(architecture, fields):
    return make_model(architecture, {**fields, "vocab_size": VOCAB_SIZE})


class TestMistral(TransformersConformance):
    variants = variants_of("MistralForCausalLM")

    def make_hf_model(self, **variant):
        return make("MistralForCausalLM", variant)


class TestQwen2(TransformersConformance):
    variants = variants_of("Qwen2ForCausalLM")

    def make_hf_model(self, **variant):
        return make("Qwen2ForCausalLM", variant)


class TestQwen3(TransformersConformance):
    variants = variants_of("Qwen3ForCausalLM")

    def make_hf_model(self, **variant):
        return make("Qwen3ForCausalLM", variant)


class TestPhi3(TransformersConformance):
    variants = variants_of("Phi3ForCausalLM")

    def make_hf_model(self, **variant):
        return make("Phi3ForCausalLM", variant)


class TestGemma2(TransformersConformance):
    variants = variants_of("Gemma2ForCausalLM")

    def make_hf_model(self, **variant):
        return make("Gemma2ForCausalLM", variant)


class TestGemma3(TransformersConformance):
    variants = variants_of("Gemma3ForCausalLM")

    def make_hf_model(self, **variant):
        return make("Gemma3ForCausalLM", variant)


class TestGemma3n(TransformersConformance):
    variants = variants_of("Gemma3nForCausalLM")

    def make_hf_model(self, **variant):
        return make("Gemma3nForCausalLM", variant)


class TestGranite(TransformersConformance):
    variants = variants_of("GraniteForCausalLM")

    def make_hf_model(self, **variant):
        return make("GraniteForCausalLM", variant)


class TestGlm(TransformersConformance):
    variants = variants_of("GlmForCausalLM")

    def make_hf_model(self, **variant):
        return make("GlmForCausalLM", variant)


class TestGlm4(TransformersConformance):
    variants = variants_of("Glm4ForCausalLM")

    def make_hf_model(self, **variant):
        return make("Glm4ForCausalLM", variant)


class TestOlmo2(TransformersConformance):
    variants = variants_of("Olmo2ForCausalLM")

    def make_hf_model(self, **variant):
        return make("Olmo2ForCausalLM", variant)


class TestOPT(TransformersConformance):
    variants = variants_of("OPTForCausalLM")

    def make_hf_model(self, **variant):
        return make("OPTForCausalLM", variant)


class TestGPT2(TransformersConformance):
    variants = variants_of("GPT2LMHeadModel")

    def make_hf_model(self, **variant):
        return make("GPT2LMHeadModel", variant)
