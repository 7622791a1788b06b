"""What a front hands to the engine, and how one request is handled."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypedDict

from toolkit_lm.messages import EncoderInput, EngineRequest, MultiModalFeatureSpec
from toolkit_lm.processing.pinned_rendering import PinnedRendering
from toolkit_lm.renderer import StopScope

StopScopeMaker = Callable[[str], StopScope]


class RenderedPrompt(NamedTuple):
    """What a model reads. Texts are None where the prompt was a conversation or token ids."""

    token_ids: list[int]
    text: str | None
    encoder: EncoderInput | None = None
    """Of an encoder-decoder model; `token_ids` are then the decoder's."""
    encoder_text: str | None = None
    features: list[MultiModalFeatureSpec] | None = None
    """Items of media that stand among `token_ids`."""
    rendering: PinnedRendering | None = None
    """What made these."""


class PreparedRequest(NamedTuple):
    """A request that has been rendered and checked, and not yet been queued."""

    message: EngineRequest
    prompt: str | None
    """The text that the engine reads; None where the prompt was a conversation or token ids."""
    encoder_prompt: str | None = None
    """The same of the encoder's prompt."""
    rendering: PinnedRendering | None = None
    """Of a prompt with items of media: it finds what the engine holds of them, or else their
    data."""
    stop_scope: StopScopeMaker | None = None
    """As of RequestOptions."""


class RequestOptions(TypedDict, total=False):
    """How one request is handled, apart from what is drawn."""

    priority: int
    """Smaller is served first, under the policy 'priority'. 0 where not given."""
    timeout: float | None
    """Seconds after which it ends with finish_reason "timeout", wherever it is."""
    cache_salt: str | None
    """Only requests of the same salt share cached prefixes: it keeps tenants from learning what
    others sent."""
    context: dict[str, str]
    """Attached to the request's events, for plugins that watch: trace headers, say."""
    stop_scope: StopScopeMaker | None
    """Makes what tells where in a sequence's text stop texts count, by the prompt's last
    characters: such as AnswerFormat.stop_scope.

    None: they count everywhere.
    """
