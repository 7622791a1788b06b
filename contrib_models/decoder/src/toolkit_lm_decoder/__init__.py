"""Decoder-only language models. This entry module only registers them; each is imported when it is
selected."""

from toolkit_lm.plugin import ModelRegistry, hookimpl

MODELS = {
    "GPT2LMHeadModel": "gpt2",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3nForCausalLM": "gemma3n",
    "Glm4ForCausalLM": "glm4",
    "GlmForCausalLM": "glm",
    "GraniteForCausalLM": "granite",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "OPTForCausalLM": "opt",
    "Olmo2ForCausalLM": "olmo2",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Architectures, and the modules that hold a class of that name."""


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    for architecture, module in MODELS.items():
        model_type = f"{module}_text" if module.startswith("gemma3") else module
        models.add(
            architecture, f"toolkit_lm_decoder.{module}:{architecture}", model_type=model_type
        )
    # EmbeddingGemma's name; its `model_type` is that of the language model.
    models.add("Gemma3TextModel", "toolkit_lm_decoder.gemma3:Gemma3ForCausalLM")
    # Qwen2 with heads for further tokens, which only a drafter reads.
    models.add("MiMoForCausalLM", "toolkit_lm_decoder.qwen2:MiMoForCausalLM")
