"""Implements a hook that does not exist."""

from llm_toolkit.plugin import ModelRegistry, hookimpl


@hookimpl
def toolkit_register_model(models: ModelRegistry) -> None:
    models.add("MisspeltForCausalLM", "nowhere:Misspelt")
