"""make_renderer: makes the renderer of a front."""

from __future__ import annotations

from toolkit_lm.config import VllmConfig
from toolkit_lm.plugin import Plugins
from toolkit_lm.renderer.contract import Renderer


def make_renderer(config: VllmConfig, plugins: Plugins) -> Renderer:
    """Makes the renderer of a resolved config, with the rules of a multimodal model. Raises
    ToolkitError."""
    made: Renderer = plugins.renderers.make(config.renderer.renderer, config)
    made.plugins = plugins
    architecture = config.checkpoint.architecture if config.checkpoint is not None else ""
    rules = plugins.models.load_multimodal(architecture) if architecture in plugins.models else None
    if rules is not None:
        with plugins.models.get(architecture).owner.boundary(
            f"the rules of {architecture!r}", target=rules
        ):
            made.set_rules(rules(config))
    return made
