"""Recurrent and hybrid language models. This entry module only registers them; each is imported
when it is selected."""

from typing import Any

from toolkit_lm.plugin import KVKindRegistry, ModelRegistry, hookimpl

MODELS = {
    "BambaForCausalLM": "bamba",
    "FalconH1ForCausalLM": "falcon_h1",
    "FalconMambaForCausalLM": "falcon_mamba",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "JambaForCausalLM": "jamba",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2_moe",
    "Lfm3ForCausalLM": "lfm3",
    "Mamba2ForCausalLM": "mamba2",
    "MambaForCausalLM": "mamba",
    "NemotronHForCausalLM": "nemotron_h",
    "OlmoHybridForCausalLM": "olmo_hybrid",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "RecurrentGemmaForCausalLM": "recurrent_gemma",
    "RwkvForCausalLM": "rwkv",
    "Zamba2ForCausalLM": "zamba2",
}
"""Architectures, and the modules that hold a class of that name."""
MODEL_TYPES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""Values of `model_type`, if they are not the module's name."""
UNBOUNDED = {
    "FalconMambaForCausalLM",
    "Mamba2ForCausalLM",
    "MambaForCausalLM",
    "RecurrentGemmaForCausalLM",
    "RwkvForCausalLM",
}
"""Architectures whose checkpoints state no longest sequence: without attention, or with windows
alone."""


@hookimpl
def toolkit_register_kv_kinds(kv_kinds: KVKindRegistry) -> None:
    kv_kinds.add("recurrent_state", "toolkit_lm_hybrid.spec:RecurrentStateSpec")


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    for architecture, module in MODELS.items():
        unbounded = {"length_keys": (), "bounded": False}
        limits: dict[str, Any] = unbounded if architecture in UNBOUNDED else {}
        models.add(
            architecture,
            f"toolkit_lm_hybrid.{module}:{architecture}",
            model_type=MODEL_TYPES.get(module, module),
            **limits,
        )
