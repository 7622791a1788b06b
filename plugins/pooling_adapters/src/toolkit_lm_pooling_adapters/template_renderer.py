"""Queries and documents by a score template: what core asks this plugin for."""

from __future__ import annotations

from toolkit_lm.config import VllmConfig
from toolkit_lm.plugin import Plugins
from toolkit_lm.prompts import Scored
from toolkit_lm.renderer import RenderedText, Renderer

from toolkit_lm_pooling_adapters.pair_renderer import PairRenderer
from toolkit_lm_pooling_adapters.score_template import (
    ScoreTemplate,
    score_media,
    score_tokens,
)
from toolkit_lm_pooling_adapters.template_choice import choose_score_template


class TemplateRenderer(PairRenderer):
    """Writes pairs with a score template."""

    def __init__(self, template: ScoreTemplate, renderer: Renderer) -> None:
        self.takes_instruction = template.takes_instruction
        self.takes_media = renderer.rules is not None
        self._template = template
        self._renderer = renderer

    def render_pair(
        self,
        query: str,
        document: str,
        instruction: str | None = None,
        *,
        max_tokens: int | None = None,
    ) -> list[int]:
        return score_tokens(
            self._renderer, self._template, query, document, instruction, max_tokens=max_tokens
        )

    def render_media_pair(
        self, query: Scored, document: Scored, instruction: str | None = None
    ) -> RenderedText:
        return score_media(self._renderer, self._template, query, document, instruction)


def make_template_renderer(
    config: VllmConfig, renderer: Renderer, plugins: Plugins
) -> TemplateRenderer | None:
    """With the template that a resolved config asks for; None: there is none. Raises as
    `choose_score_template`."""
    template = choose_score_template(config, plugins)
    return None if template is None else TemplateRenderer(template, renderer)
