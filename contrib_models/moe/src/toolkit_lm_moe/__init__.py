"""Mixture-of-experts language models. This entry module only registers them; each is imported when
it is selected."""

from toolkit_lm.plugin import ModelRegistry, hookimpl

MODELS = {
    "Gemma4ForCausalLM": "gemma4",
    "GptOssForCausalLM": "gpt_oss",
    "Llama4ForCausalLM": "llama4",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""Architectures, and the modules that hold a class of that name."""


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    for architecture, module in MODELS.items():
        model_type = f"{module}_text" if module in ("gemma4", "llama4") else module
        models.add(architecture, f"toolkit_lm_moe.{module}:{architecture}", model_type=model_type)
