"""A model whose second layer reads the keys and values of the first, as the last layers of Gemma 3n
do."""

from toolkit_lm.plugin import ModelRegistry, hookimpl


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    models.add(
        "SharedKVForCausalLM", "toolkit_lm_shared_kv.model:SharedKVForCausalLM", length_keys=()
    )
