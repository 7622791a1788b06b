"""Language models with multi-head latent attention or the routing of DeepSeek (DeepSeek-AI 2024).
This entry module only registers them, their kind of KV cache and its attention backend; each is
imported when it is selected."""

from typing import Any

from toolkit_lm.plugin import (
    AttentionBackendRegistry,
    KVKindRegistry,
    ModelRegistry,
    hookimpl,
)

MODELS = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "KimiLinearForCausalLM": "kimi_linear",
    "LongcatFlashForCausalLM": "longcat_flash",
    "MiniCPM3ForCausalLM": "minicpm3",
}
"""Architectures, and the modules that hold a class of that name."""
LENGTH_KEYS = {"KimiLinearForCausalLM": ("model_max_length",)}
"""Where config.json states the longest sequence, if not where others do."""


@hookimpl
def toolkit_register_kv_kinds(kv_kinds: KVKindRegistry) -> None:
    kv_kinds.add("latent", "toolkit_lm_deepseek.spec:LatentSpec")


@hookimpl
def toolkit_register_attention_backends(backends: AttentionBackendRegistry) -> None:
    backends.add("latent", "toolkit_lm_deepseek.backend:LatentBackend")


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    for architecture, module in MODELS.items():
        keys = LENGTH_KEYS.get(architecture)
        limits: dict[str, Any] = {} if keys is None else {"length_keys": keys}
        models.add(
            architecture,
            f"toolkit_lm_deepseek.{module}:{architecture}",
            model_type=module,
            **limits,
        )
