"""Mixture-of-experts language models. This entry module only registers them; each is imported when
it is selected."""

from toolkit_lm.plugin import ModelRegistry, hookimpl


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    models.add(
        "MixtralForCausalLM", "toolkit_lm_moe.mixtral:MixtralForCausalLM", model_type="mixtral"
    )
    models.add(
        "Qwen3MoeForCausalLM",
        "toolkit_lm_moe.qwen3_moe:Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
    )
