"""Implements a hook that does not exist."""

from toolkit_lm.plugin import ModelRegistry, hookimpl


@hookimpl
def toolkit_register_model(models: ModelRegistry) -> None:
    models.add("MisspeltForCausalLM", "nowhere:Misspelt")
