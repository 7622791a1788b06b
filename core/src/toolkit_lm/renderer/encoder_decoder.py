"""The contract of EncoderDecoderRules: what an encoder-decoder model makes of prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from toolkit_lm.config import VllmConfig
from toolkit_lm.messages import EncoderInput
from toolkit_lm.params import SamplingParams
from toolkit_lm.prompts import Conversation, Prompt
from toolkit_lm.renderer.contract import Renderer


class RenderedPair(NamedTuple):
    """What both sides of a model read. Texts are None where the prompt was a conversation or token
    ids."""

    token_ids: list[int]
    """The decoder's."""
    text: str | None
    encoder: EncoderInput
    encoder_text: str | None


class EncoderDecoderRules(ABC):
    """A model is registered with a subclass: `models.add(..., encoder_decoder="module:Class")`.
    toolkit_lm_encdec has the usual ones.

    One instance serves all requests of an engine, from several threads. It needs no torch. Methods
    raise RequestError.
    """

    encoder_length_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of config.json: the first that is there states the longest encoder prompt. None there:
    as many tokens as max_model_len."""

    def __init__(self, config: VllmConfig, renderer: Renderer) -> None:
        """`config` is resolved."""
        self.config = config
        self.renderer = renderer

    @abstractmethod
    def read(self, prompt: Prompt, params: SamplingParams) -> RenderedPair:
        """A prompt. It may be cut as `truncate_prompt_tokens` says: -1 stands for what the encoder
        can take."""

    @abstractmethod
    def read_conversation(
        self, messages: Conversation, params: SamplingParams, **options: Any
    ) -> RenderedPair:
        """A conversation. `options` are Renderer.render_conversation's."""

    def forced_tokens(
        self, decoder_prompt: Sequence[int], max_output_tokens: int
    ) -> dict[int, int]:
        """By place in the output, tokens that are drawn there whatever the logits are."""
        return {}

    def bad_words(self) -> list[list[int]]:
        """Sequences of tokens of which the last is not drawn after the others."""
        return []

    def logits_processors(
        self, decoder_prompt: Sequence[int], max_output_tokens: int
    ) -> dict[str, dict[str, Any]]:
        """Arguments of registered logits processors, by name, that every request of the model
        has."""
        return {}
