"""A renderer for checkpoints in Mistral's own format (tekken.json), through mistral-common: no
tokenizers, no transformers, no torch."""

from toolkit_lm.plugin import RendererRegistry, hookimpl


@hookimpl
def toolkit_register_renderers(renderers: RendererRegistry) -> None:
    # hf has the same priority and comes first: a checkpoint with files of both uses hf, unless this
    # renderer is asked for by name.
    renderers.add(
        "mistral", "toolkit_lm_renderer_mistral.renderer:MistralRenderer", reads=("tekken.json",)
    )
