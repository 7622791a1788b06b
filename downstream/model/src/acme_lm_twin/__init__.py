"""Registers the model class of the architecture TwinForCausalLM."""

from toolkit_lm.plugin import ModelRegistry, hookimpl


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    models.add("TwinForCausalLM", "acme_lm_twin.model:TwinForCausalLM")
