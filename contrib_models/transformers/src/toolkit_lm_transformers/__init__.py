"""Models of transformers, for architectures without a class of their own. This entry module only
registers the fallback."""

from toolkit_lm.plugin import KVKindRegistry, ModelRegistry, hookimpl


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    models.add_fallback("transformers", "toolkit_lm_transformers.model:TransformersForCausalLM")
    models.add_fallback(
        "transformers_pooling",
        "toolkit_lm_transformers.pooling:TransformersForPooling",
        runner="pooling",
    )


@hookimpl
def toolkit_register_kv_kinds(kv_kinds: KVKindRegistry) -> None:
    kv_kinds.add("transformers_tokens", "toolkit_lm_transformers.spec:TokensSpec")
    kv_kinds.add("transformers_states", "toolkit_lm_transformers.spec:StatesSpec")
