"""DeepSeek-V2 with dense layers: multi-head latent attention (DeepSeek-AI 2024). Its layers keep
one latent vector per token, in a KV kind of their own, which a backend of their own reads."""

from toolkit_lm.plugin import (
    AttentionBackendRegistry,
    KVKindRegistry,
    ModelRegistry,
    hookimpl,
)


@hookimpl
def toolkit_register_kv_kinds(kv_kinds: KVKindRegistry) -> None:
    kv_kinds.add("latent", "toolkit_lm_mla.spec:LatentSpec")


@hookimpl
def toolkit_register_attention_backends(backends: AttentionBackendRegistry) -> None:
    backends.add("latent", "toolkit_lm_mla.backend:LatentBackend")


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    models.add(
        "DeepseekV2ForCausalLM",
        "toolkit_lm_mla.model:DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
    )
