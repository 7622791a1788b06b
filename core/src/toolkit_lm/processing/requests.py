"""Requests that a front sends to the engine, and their options."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypedDict

from toolkit_lm.messages import EncoderInput, EngineRequest, MultiModalFeatureSpec
from toolkit_lm.processing.pinned_rendering import PinnedRendering
from toolkit_lm.renderer import StopScope

StopScopeMaker = Callable[[str], StopScope]


class RenderedPrompt(NamedTuple):
    """A rendered prompt. Texts are None if the prompt was a conversation or token ids."""

    token_ids: list[int]
    text: str | None
    encoder: EncoderInput | None = None
    """Encoder input of an encoder-decoder model. `token_ids` are then the decoder's."""
    encoder_text: str | None = None
    features: list[MultiModalFeatureSpec] | None = None
    """Multimodal items among `token_ids`."""
    rendering: PinnedRendering | None = None
    """The rendering that made the tokens and features."""


class PreparedRequest(NamedTuple):
    """A request that has been rendered and checked, but not yet queued."""

    message: EngineRequest
    prompt: str | None
    """The text that the engine reads; None if the prompt was a conversation or token ids."""
    encoder_prompt: str | None = None
    """The text that the encoder reads; None if there is none."""
    rendering: PinnedRendering | None = None
    """Rendering of a prompt with multimodal items. It finds the items that the engine holds, or
    else their data."""
    stop_scope: StopScopeMaker | None = None
    """Maker of the stop scope, as in RequestOptions."""


class RequestOptions(TypedDict, total=False):
    """How one request is handled, apart from sampling."""

    priority: int
    """Smaller values are served first, under the policy 'priority'. Default: 0."""
    timeout: float | None
    """Seconds after which the request ends with finish_reason "timeout", running or waiting."""
    cache_salt: str | None
    """Only requests with the same salt share cached prefixes. It keeps tenants from learning what
    others sent."""
    context: dict[str, str]
    """Values attached to the request's events, for plugins that listen: for instance trace
    headers."""
    stop_scope: StopScopeMaker | None
    """Makes the scope of stop texts in a sequence's text, from the prompt's last characters: for
    instance AnswerFormat.stop_scope.

    None: stop texts apply everywhere.
    """
