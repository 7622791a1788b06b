"""Mamba (Gu and Dao 2023): a recurrent model. Its layers keep a state of fixed size, in a KV kind
of their own."""

from toolkit_lm.plugin import KVKindRegistry, ModelRegistry, hookimpl


@hookimpl
def toolkit_register_kv_kinds(kv_kinds: KVKindRegistry) -> None:
    kv_kinds.add("mamba", "toolkit_lm_mamba.spec:MambaSpec")


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    # No position ends it.
    models.add(
        "MambaForCausalLM", "toolkit_lm_mamba.model:MambaForCausalLM", length_keys=(), override=True
    )
