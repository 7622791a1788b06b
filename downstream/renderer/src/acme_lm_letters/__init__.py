"""Registers the renderer "letters"."""

from toolkit_lm.plugin import RendererRegistry, hookimpl


@hookimpl
def toolkit_register_renderers(renderers: RendererRegistry) -> None:
    renderers.add("letters", "acme_lm_letters.renderer:LettersRenderer", reads=("letters.json",))
