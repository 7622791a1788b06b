"""Captioner: an encoder-decoder model whose decoder reads images among its tokens."""

from toolkit_lm.plugin import ModelRegistry, hookimpl


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    models.add(
        "CaptionerModel",
        "toolkit_lm_captioner.model:CaptionerModel",
        renderer="glance",
        encoder_decoder="toolkit_lm_scribe.rules:ScribeRules",
        multimodal="toolkit_lm_glance.rules:GlanceRules",
    )
