"""Mixture-of-experts language models. This entry module only registers them; each is imported when
it is selected."""

from toolkit_lm.plugin import ModelRegistry, hookimpl

MODELS = {
    "GptOssForCausalLM": "gpt_oss",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""Architectures, and the modules that hold a class of that name."""


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    for architecture, module in MODELS.items():
        models.add(architecture, f"toolkit_lm_moe.{module}:{architecture}", model_type=module)
