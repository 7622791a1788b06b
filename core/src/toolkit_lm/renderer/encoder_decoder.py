"""The contract of EncoderDecoderRules: conversion of prompts to both inputs of an encoder-decoder
model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from toolkit_lm.config import VllmConfig
from toolkit_lm.messages import EncoderInput, MultiModalFeatureSpec
from toolkit_lm.params import SamplingParams
from toolkit_lm.prompts import Conversation, Prompt
from toolkit_lm.renderer.contract import Renderer


class RenderedPair(NamedTuple):
    """Rendered inputs of both sides of a model. Texts are None if the prompt was a conversation or
    token ids."""

    token_ids: list[int]
    """Token ids of the decoder."""
    text: str | None
    encoder: EncoderInput
    encoder_text: str | None
    features: list[MultiModalFeatureSpec] | None = None
    """Items of media that stand among the decoder's tokens, of a model that reads them."""


class EncoderDecoderRules(ABC):
    """Rules for prompts of a model. A model is registered with a subclass: `models.add(...,
    encoder_decoder="module:Class")`. toolkit_lm_encdec has the usual ones.

    One instance serves all requests of an engine, from several threads. It needs no torch. Methods
    raise RequestError.
    """

    encoder_length_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of config.json: the first present one states the longest encoder prompt. If none is
    present: max_model_len."""

    def __init__(self, config: VllmConfig, renderer: Renderer) -> None:
        """`config` is resolved."""
        self.config = config
        self.renderer = renderer

    @abstractmethod
    def read(self, prompt: Prompt, params: SamplingParams) -> RenderedPair:
        """Reads a prompt. It may be cut to `truncate_prompt_tokens`; -1 stands for the encoder's
        limit."""

    @abstractmethod
    def read_conversation(
        self, messages: Conversation, params: SamplingParams, **options: Any
    ) -> RenderedPair:
        """Reads a conversation. `options` are Renderer.render_conversation's."""

    def forced_tokens(
        self, decoder_prompt: Sequence[int], max_output_tokens: int
    ) -> dict[int, int]:
        """Tokens that are sampled whatever the logits are, by index in the output."""
        return {}

    def bad_words(self) -> list[list[int]]:
        """Forbidden token sequences: after all but the last token, the last is masked."""
        return []

    def logits_processors(
        self, decoder_prompt: Sequence[int], max_output_tokens: int
    ) -> dict[str, dict[str, Any]]:
        """Arguments of registered logits processors, by name, that every request of the model
        has."""
        return {}
