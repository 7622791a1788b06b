"""Request bodies of the routes that render, tokenize and detokenize."""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import Field
from toolkit_lm.errors import RequestError
from toolkit_lm.prompts import Prompt

from toolkit_lm_server.completions import CompletionBody
from toolkit_lm_server.fields import Items
from toolkit_lm_server.json_body import ManyItems
from toolkit_lm_server.message_schemas import AnyMessage, AnyTool
from toolkit_lm_server.protocol import Body, ChatBody, RenderBody, examples
from toolkit_lm_server.request_fields import TOKENS


class TokenizeBody(RenderBody):
    """The body of POST /tokenize, with a text or a conversation."""

    verdicts = TOKENS

    model_config = examples(
        {"prompt": "Once upon a time"}, {"messages": [{"role": "user", "content": "hi"}]}
    )

    prompt: str | None = None
    """The text."""
    messages: ManyItems[AnyMessage] | None = None
    """A conversation, in place of a text."""
    tools: Items[AnyTool] | None = None
    """Functions that the chat template is given."""
    return_token_strs: bool = False
    """The answer has the texts of the tokens, too."""

    def render_options(self) -> dict[str, Any]:
        return super().render_options() | ({"tools": self.tools} if self.tools else {})


class DetokenizeBody(Body):
    """The body of POST /detokenize."""

    verdicts = TOKENS

    model_config = examples({"tokens": [5, 6, 7]})

    tokens: Items[int]
    """The token ids."""


class DerenderBody(Body):
    """The body of POST /derender."""

    verdicts = TOKENS

    model_config = examples({"token_ids": [5, 6, 7]})

    token_ids: Items[int]
    """The token ids to derender."""
    prompt_token_ids: Items[int] = []
    """The token ids before those to derender. The join of the first text depends on them."""
    skip_special_tokens: bool = True
    """Special tokens have no text."""


class Held(Body):
    """Fields of the routes that render: media items that engines hold, and who checks the
    length."""

    held: Items[str] = []
    """Identifiers of media items whose data the engine holds. The answer leaves the data out."""
    media_owner: Annotated[str, Field(max_length=512)] = ""
    """The tenant whose names of media items (`uuid`) the request uses, where an engine asks for
    several."""
    check_length: bool = True
    """A prompt that leaves no room for a token is refused. With false the caller checks it."""


class ChatRenderBody(ChatBody, Held):
    """The body of POST /v1/chat/completions/render."""

    def render_options(self) -> dict[str, Any]:
        return super().render_options() | ({"tools": self.tools} if self.tools else {})


class CompletionRenderBody(CompletionBody, Held):
    """The body of POST /v1/completions/render."""

    multi_modal_data: dict[str, Any] | None = None
    """An item or a list of items, by modality, for one prompt: {"image":
    ["data:image/png;base64,..."]}."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Options of the checkpoint's processor of images and other media."""
    multi_modal_uuids: dict[str, Any] | None = None
    """The client's own names of the items, by modality. Equal items with different names share
    nothing. An item that multi_modal_data leaves out, or has as null, is the one sent before with
    its name."""

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
