"""Language models that hear. This entry module only registers them; each is imported when it is
selected."""

from toolkit_lm.plugin import ModelRegistry, hookimpl


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    target = "toolkit_lm_audio.qwen2_audio:Qwen2AudioForConditionalGeneration"
    rules = "toolkit_lm_audio.rules:Qwen2AudioRules"
    keys = ("text_config.max_position_embeddings",)
    models.add(
        "Qwen2AudioForConditionalGeneration",
        target,
        model_type="qwen2_audio",
        length_keys=keys,
        multimodal=rules,
    )
