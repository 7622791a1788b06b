"""A renderer for prompts whose pictures, or recordings, are arrays already: {"prompt_token_ids":
[...], "multi_modal_data": {"image": [{name: array}, ...]}}."""

from __future__ import annotations

from typing import Any

from toolkit_lm.errors import RequestError
from toolkit_lm.messages import Array, MultiModalFeatureSpec, PlaceholderRange
from toolkit_lm.plugin import RendererRegistry, hookimpl
from toolkit_lm.renderer import Rendered
from toolkit_lm_renderer_hf.tokens import TokenRenderer

FIRST_SPECIAL = 110
"""Tokens from here on stand for media; no prompt has them as text."""


class GivenRenderer(TokenRenderer):
    """Puts each picture in the place of the next placeholder, by the model's rules."""

    def render_prompt(self, prompt: Any, *, add_special_tokens: bool = True) -> Rendered:
        given = prompt.get("multi_modal_data") or {}
        modality = "audio" if "audio" in given else "image"
        pictures = list(given.get(modality, ()))
        if self.rules is None or not pictures:
            return Rendered(prompt["prompt_token_ids"])
        found: list[int] = []
        features = []
        for token in prompt["prompt_token_ids"]:
            if token < FIRST_SPECIAL:
                found.append(token)
                continue
            arrays = pictures.pop(0)
            try:
                replacement = self.rules.replacement(modality, arrays)
            except RequestError:
                # Rules of a native model count the tokens by themselves.
                arrays = {name: array for name, array in arrays.items() if name != "input_ids"}
                replacement = self.rules.replacement(modality, arrays)
            features.append(
                MultiModalFeatureSpec(
                    modality=modality,
                    mm_identifier=str(hash(b"".join(array.tobytes() for array in arrays.values()))),
                    mm_position=PlaceholderRange(
                        len(found), len(replacement.token_ids), replacement.mask
                    ),
                    data={name: Array.of(array) for name, array in arrays.items()},
                    layout=replacement.layout,
                )
            )
            found += replacement.token_ids
        return Rendered(found, features)


class Given:
    """The plugin that registers it."""

    name = "given_pictures"

    @hookimpl
    def toolkit_register_renderers(self, renderers: RendererRegistry) -> None:
        renderers.add("given_pictures", "given_pictures:GivenRenderer", reads=())
