"""Glance: a language model that sees rows of tiles, and a renderer that cuts them."""

from toolkit_lm.plugin import ModelRegistry, RendererRegistry, hookimpl


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    models.add(
        "GlanceForConditionalGeneration",
        "toolkit_lm_glance.model:GlanceForConditionalGeneration",
        length_keys=("text_config.max_position_embeddings",),
        renderer="glance",
        multimodal="toolkit_lm_glance.rules:GlanceRules",
    )


@hookimpl
def toolkit_register_renderers(renderers: RendererRegistry) -> None:
    renderers.add("glance", "toolkit_lm_glance.renderer:GlanceRenderer", reads=())
