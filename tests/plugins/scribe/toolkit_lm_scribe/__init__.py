"""Scribe: an encoder-decoder model with grouped queries and a sliding window."""

from toolkit_lm.plugin import ModelRegistry, hookimpl


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    models.add(
        "ScribeModel",
        "toolkit_lm_scribe.model:ScribeModel",
        encoder_decoder="toolkit_lm_scribe.rules:ScribeRules",
    )
