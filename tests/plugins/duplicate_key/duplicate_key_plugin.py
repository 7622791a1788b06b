"""Registers an architecture that good-model registers; it comes after it in load order."""

from toolkit_lm.plugin import ModelRegistry, hookimpl


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    models.add("ZebraForCausalLM", "nowhere:Zebra")
    models.add("GoodForCausalLM", "nowhere:Good")
