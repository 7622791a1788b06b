"""PromptReader: prompts and conversations become token ids, of a decoder alone or of an encoder and its decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import EncoderInput
from toolkit_lm.params import SamplingParams
from toolkit_lm.plugin import Plugins
from toolkit_lm.processing.validation import cut_prompt
from toolkit_lm.prompts import Conversation, Prompt, SingletonPrompt, parse_prompt
from toolkit_lm.renderer import EncoderDecoderRules, Renderer


class RenderedPrompt(NamedTuple):
    """What the model reads. Texts are None where the prompt was a conversation or token ids."""

    token_ids: list[int]
    text: str | None
    encoder: EncoderInput | None = None
    encoder_text: str | None = None


class PromptReader:
    """Renders prompts and cuts them, as `truncate_prompt_tokens` says. Methods raise RequestError."""

    def __init__(self, config: VllmConfig, renderer: Renderer, plugins: Plugins) -> None:
        """`config` is resolved. Raises PluginError."""
        self.config = config
        self.renderer = renderer
        self.plugins = plugins
        self.rules: EncoderDecoderRules | None = None
        """Of an encoder-decoder model."""
        assert config.checkpoint is not None, "the config is not resolved: it has no checkpoint"
        architecture = config.checkpoint.architecture
        if architecture in plugins.models and (rules := plugins.models.load_rules(architecture)) is not None:
            self.rules = rules(config, renderer)

    def read(self, prompt: Prompt, params: SamplingParams) -> RenderedPrompt:
        """A prompt. Of an encoder-decoder model any but an ExplicitEncoderDecoderPrompt is the encoder's."""
        given: Any = prompt
        explicit = isinstance(given, Mapping) and bool({"encoder_prompt", "decoder_prompt"} & set(given))
        try:
            if self.rules is None:
                if explicit:
                    raise RequestError("this model has no encoder beside its decoder: give one prompt, not two.", "prompt")
                return self._cut(self.renderer.render_prompt(given), _text_of(given), params)
            if not explicit:
                return self._both(given, None, params)
            if unknown := set(given) - {"encoder_prompt", "decoder_prompt"}:
                raise RequestError(f"unknown key {min(map(str, unknown))!r} beside encoder_prompt and decoder_prompt.", "prompt")
            if given.get("encoder_prompt") is None:
                raise RequestError("a decoder prompt needs an encoder prompt beside it: the key 'encoder_prompt'.", "prompt")
            return self._both(given["encoder_prompt"], given.get("decoder_prompt"), params)
        except Exception as error:
            self.plugins.boundary.check(error)
            raise

    def read_conversation(self, messages: Conversation, params: SamplingParams, **options: Any) -> RenderedPrompt:
        """A conversation, through the chat template. `options` are Renderer.render_conversation's.

        The encoder of a model without a template reads the system message and the last message: each turn stands for itself.
        """
        try:
            if self.rules is None:
                return self._cut(self.renderer.render_conversation(messages, **options), None, params)
            if not self.renderer.has_chat_template:
                return self._both(_last_turn(messages), None, params)
            token_ids = self.renderer.render_conversation(messages, **options)
            return self._both({"prompt_token_ids": token_ids}, None, params)
        except Exception as error:
            self.plugins.boundary.check(error)
            raise

    def _cut(self, token_ids: list[int], text: str | None, params: SamplingParams) -> RenderedPrompt:
        if params.truncate_prompt_tokens is not None:
            cut = cut_prompt(token_ids, params, self.config.max_model_len)
            if text is not None and len(cut) < len(token_ids):
                text = self.renderer.decode(cut)
            token_ids = cut
        return RenderedPrompt(token_ids, text)

    def _both(self, encoder: SingletonPrompt, decoder: SingletonPrompt | None, params: SamplingParams) -> RenderedPrompt:
        assert self.rules is not None, "the model has no encoder"
        text = None
        if decoder is None:
            token_ids = self.rules.default_decoder_prompt()
        elif "prompt_token_ids" in (parsed := parse_prompt(decoder)):
            token_ids = self.rules.decoder_prompt(self.renderer.render_prompt(parsed))
            text = _text_of(decoder)
        else:
            token_ids = [*self.rules.default_decoder_prompt(), *self.renderer.render_prompt(parsed, add_special_tokens=False)]
            text = _text_of(decoder)
        most = self.config.max_encoder_len if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
        return RenderedPrompt(token_ids, text, self.rules.encoder_input(encoder, most), _text_of(encoder))


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
