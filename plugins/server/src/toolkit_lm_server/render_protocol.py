"""What clients send to the routes that render, or that make tokens and texts of each other."""

from __future__ import annotations

from typing import Any, cast

from toolkit_lm.errors import RequestError
from toolkit_lm.prompts import Prompt

from toolkit_lm_server.completions import CompletionBody
from toolkit_lm_server.fields import Items
from toolkit_lm_server.protocol import Body, ChatBody, RenderBody, examples
from toolkit_lm_server.request_fields import TOKENS


class TokenizeBody(RenderBody):
    """POST /tokenize, of a text or a conversation."""

    verdicts = TOKENS

    model_config = examples(
        {"prompt": "Once upon a time"}, {"messages": [{"role": "user", "content": "hi"}]}
    )

    prompt: str | None = None
    messages: Items[dict[str, Any]] | None = None
    tools: Items[dict[str, Any]] | None = None
    """For the chat template."""
    return_token_strs: bool = False

    def render_options(self) -> dict[str, Any]:
        return super().render_options() | ({"tools": self.tools} if self.tools else {})


class DetokenizeBody(Body):
    """POST /detokenize."""

    verdicts = TOKENS

    model_config = examples({"tokens": [5, 6, 7]})

    tokens: Items[int]


class DerenderBody(Body):
    """POST /derender."""

    verdicts = TOKENS

    model_config = examples({"token_ids": [5, 6, 7]})

    token_ids: Items[int]
    prompt_token_ids: Items[int] = []
    """Those before them, on which depends how the first one joins on."""
    skip_special_tokens: bool = True


class Held(Body):
    """What engines hold of media, and who checks the length: fields of the routes that render."""

    held: Items[str] = []
    """Identifiers of items of media whose data the engine holds: it is left out."""
    check_length: bool = True
    """A prompt that leaves no room for a token is refused. False: whoever asks sees to it."""


class ChatRenderBody(ChatBody, Held):
    """POST /v1/chat/completions/render."""

    def render_options(self) -> dict[str, Any]:
        return super().render_options() | ({"tools": self.tools} if self.tools else {})


class CompletionRenderBody(CompletionBody, Held):
    """POST /v1/completions/render."""

    multi_modal_data: dict[str, Any] | None = None
    """By modality, an item or a list of items: {"image": ["data:image/png;base64,..."]}. For one
    prompt."""
    mm_processor_kwargs: dict[str, Any] | None = None
    multi_modal_uuids: dict[str, Any] | None = None
    """By modality, the caller's own names of the items. Equal items of unlike names share
    nothing."""

    def prompts(self, most: int) -> list[Prompt]:
        prompts: list[Any] = super().prompts(most)
        names = ("multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids")
        media = {name: value for name in names if (value := getattr(self, name))}
        if not media:
            return prompts
        if len(prompts) > 1:
            raise RequestError(
                "items of media are for one prompt, and there are several: ask for each of them.",
                "multi_modal_data",
            )
        [prompt] = prompts
        return [
            cast(
                "Prompt", ({"prompt": prompt} if isinstance(prompt, str) else dict(prompt)) | media
            )
        ]
