"""Models of transformers, for architectures without a class of their own. This entry module only registers the fallback."""

from llm_toolkit.plugin import ModelRegistry, hookimpl


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    models.add_fallback("transformers", "llm_toolkit_transformers.model:TransformersForCausalLM")
