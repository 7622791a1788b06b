"""A renderer that is given features: {"prompt_token_ids": [...], "multi_modal_data": {"features":
[...]}}."""

from __future__ import annotations

from typing import Any

from toolkit_lm.plugin import RendererRegistry, hookimpl
from toolkit_lm.renderer import Rendered
from toolkit_lm_renderer_hf.tokens import TokenRenderer


class GivenRenderer(TokenRenderer):
    def render_prompt(
        self, prompt: Any, *, add_special_tokens: bool = True, **media: Any
    ) -> Rendered:
        return Rendered(
            prompt["prompt_token_ids"],
            prompt.get("multi_modal_data", media.get("multi_modal_data") or {}).get("features"),
        )


class Given:
    """The plugin that registers it."""

    name = "given"

    @hookimpl
    def toolkit_register_renderers(self, renderers: RendererRegistry) -> None:
        renderers.add("given", "given_renderer:GivenRenderer", reads=())
