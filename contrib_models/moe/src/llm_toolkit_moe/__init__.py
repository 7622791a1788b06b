"""Mixture-of-experts language models. This entry module only registers them; each is imported when it is selected."""

from llm_toolkit.plugin import ModelRegistry, hookimpl


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    models.add("MixtralForCausalLM", "llm_toolkit_moe.mixtral:MixtralForCausalLM")
    models.add("Qwen3MoeForCausalLM", "llm_toolkit_moe.qwen3_moe:Qwen3MoeForCausalLM")
