"""Models of transformers, for architectures without a class of their own. This entry module only
registers the fallback."""

from toolkit_lm.plugin import ModelRegistry, hookimpl


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    models.add_fallback("transformers", "toolkit_lm_transformers.model:TransformersForCausalLM")
