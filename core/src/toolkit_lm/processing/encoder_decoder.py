"""Prompts of encoder-decoder models: what the encoder reads, and what the decoder begins with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import EncoderInput, MultiModalFeatureSpec
from toolkit_lm.params import SamplingParams
from toolkit_lm.processing.pinned_rendering import PinnedRendering
from toolkit_lm.prompts import Conversation, Prompt, SingletonPrompt, parse_prompt
from toolkit_lm.renderer import EncoderDecoderRules, Renderer


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


class EncoderDecoderReader:
    """Renders prompts by the model's rules, and cuts the encoder's. Methods raise RequestError."""

    def __init__(self, config: VllmConfig, renderer: Renderer, rules: EncoderDecoderRules) -> None:
        """`config` is resolved."""
        self.config = config
        self.renderer = renderer
        self.rules = rules

    def read(self, prompt: Prompt, params: SamplingParams) -> RenderedPrompt:
        """Any prompt but an ExplicitEncoderDecoderPrompt is the encoder's."""
        given: Any = prompt
        if not isinstance(given, Mapping) or not {"encoder_prompt", "decoder_prompt"} & set(given):
            return self._both(given, None, params)
        if unknown := set(given) - {"encoder_prompt", "decoder_prompt"}:
            raise RequestError(f"unknown key {min(map(str, unknown))!r} beside encoder_prompt and decoder_prompt.", "prompt")
        if given.get("encoder_prompt") is None:
            raise RequestError("a decoder prompt needs an encoder prompt beside it: the key 'encoder_prompt'.", "prompt")
        return self._both(given["encoder_prompt"], given.get("decoder_prompt"), params)

    def read_conversation(self, messages: Conversation, params: SamplingParams, **options: Any) -> RenderedPrompt:
        """A conversation, through the chat template. `options` are Renderer.render_conversation's.

        The encoder of a model without a template reads the system message and the last message: each turn stands for itself.
        """
        if not self.renderer.has_chat_template:
            return self._both(_last_turn(messages), None, params)
        return self._both({"prompt_token_ids": self.renderer.render_conversation(messages, **options).token_ids}, None, params)

    def _both(self, encoder: SingletonPrompt, decoder: SingletonPrompt | None, params: SamplingParams) -> RenderedPrompt:
        if decoder is None:
            token_ids = self.rules.default_decoder_prompt()
        elif "prompt_token_ids" in (parsed := parse_prompt(decoder)):
            token_ids = self.rules.decoder_prompt(self.renderer.render_prompt(parsed).token_ids)
        else:
            token_ids = [*self.rules.default_decoder_prompt(), *self.renderer.render_prompt(parsed, add_special_tokens=False).token_ids]
        most = self.config.max_encoder_len if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
        return RenderedPrompt(token_ids, _text_of(decoder), self.rules.encoder_input(encoder, most), _text_of(encoder))


def _text_of(prompt: Any) -> str | None:
    return prompt if isinstance(prompt, str) else prompt.get("prompt") if isinstance(prompt, Mapping) else None


def _last_turn(messages: Conversation) -> str:
    """The text of the system messages and the last one."""
    if isinstance(messages, str) or not messages or not all(isinstance(message, Mapping) for message in messages):
        raise RequestError("messages must be a list of at least one message.", "messages")
    read = [*(message for message in messages[:-1] if message.get("role") == "system"), messages[-1]]
    return " ".join(_content(message.get("content")) for message in read)


def _content(content: Any) -> str:
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if any(not isinstance(text, str) for text in texts):
        raise RequestError("a message's content must be a text, or a list of parts that are texts.", "messages")
    return "\n".join(map(str, texts))
