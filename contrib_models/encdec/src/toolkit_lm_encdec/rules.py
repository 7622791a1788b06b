"""Prompt rules of encoder-decoder models of text. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from msgspec import structs
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, RequestError
from toolkit_lm.messages import EncoderInput, MultiModalFeatureSpec
from toolkit_lm.params import SamplingParams
from toolkit_lm.prompts import Conversation, Prompt, SingletonPrompt, parse_prompt
from toolkit_lm.renderer import EncoderDecoderRules, RenderedPair, Renderer


class UsualRules(EncoderDecoderRules):
    """Rules of most models, in transformers' terms."""

    encoder_length_keys: ClassVar[tuple[str, ...]] = (
        "max_source_positions",
        "max_position_embeddings",
        "n_positions",
    )

    def __init__(self, config: VllmConfig, renderer: Renderer) -> None:
        super().__init__(config, renderer)
        assert config.checkpoint is not None
        stated = {
            key: value
            for key, value in config.checkpoint.generation_config.items()
            if value is not None
        }
        # transformers does the same: if the file exists, only tokens that it names are forced.
        other = {
            key: value
            for key, value in config.hf_config.items()
            if not (stated and key.startswith("forced_"))
        }
        self.generation: Mapping[str, Any] = {**other, **stated}
        """generation_config.json, and where it says nothing config.json."""

    # Prompts

    def read(self, prompt: Prompt, params: SamplingParams) -> RenderedPair:
        """Any prompt but an ExplicitEncoderDecoderPrompt is the encoder's."""
        value: Any = prompt
        if not isinstance(value, Mapping) or not {"encoder_prompt", "decoder_prompt"} & set(value):
            return self._both(value, None, params)
        if unknown := set(value) - {"encoder_prompt", "decoder_prompt"}:
            raise RequestError(
                f"unknown key {min(map(str, unknown))!r} beside encoder_prompt and decoder_prompt.",
                "prompt",
            )
        if value.get("encoder_prompt") is None:
            raise RequestError(
                "a decoder prompt needs an encoder prompt beside it: the key 'encoder_prompt'.",
                "prompt",
            )
        return self._both(value["encoder_prompt"], value.get("decoder_prompt"), params)

    def read_conversation(
        self, messages: Conversation, params: SamplingParams, **options: Any
    ) -> RenderedPair:
        """Through the chat template. Without one the encoder reads the system message and the last
        message: each turn stands for itself."""
        if not self.renderer.has_chat_template:
            return self._both(last_turn(messages), None, params)
        return self._both(
            {"prompt_token_ids": self.renderer.render_conversation(messages, **options).token_ids},
            None,
            params,
        )

    def _both(
        self, encoder: SingletonPrompt, decoder: SingletonPrompt | None, params: SamplingParams
    ) -> RenderedPair:
        features: list[MultiModalFeatureSpec] = []
        if decoder is None:
            token_ids = self.default_decoder_prompt()
        else:
            parsed = parse_prompt(decoder, media=self.renderer.rules is not None)
            is_text = "prompt_token_ids" not in parsed
            rendered = (
                self.renderer.render_prompt(parsed, add_special_tokens=False)
                if is_text
                else self.renderer.render_prompt(parsed)
            )
            token_ids = (
                [*self.default_decoder_prompt(), *rendered.token_ids]
                if is_text
                else self.decoder_prompt(rendered.token_ids)
            )
            features = _moved(rendered.features or (), len(token_ids) - len(rendered.token_ids))
        return RenderedPair(
            token_ids,
            _text_of(decoder),
            self.encoder_input(encoder, self.most_tokens(params)),
            _text_of(encoder),
            features,
        )

    def most_tokens(self, params: SamplingParams) -> int | None:
        """Most tokens of the encoder's prompt that a request keeps; None: all."""
        most = params.truncate_prompt_tokens
        return self.config.max_encoder_len if most == -1 else most

    def encoder_input(self, prompt: Any, max_tokens: int | None) -> EncoderInput:
        """The encoder's input for a prompt. `max_tokens`: where to truncate it at the end; None:
        not at all. Raises RequestError."""
        parsed = parse_prompt(prompt)
        if max_tokens is None or "prompt_token_ids" in parsed:
            return EncoderInput.of_tokens(
                self.renderer.render_prompt(parsed).token_ids[:max_tokens]
            )
        return EncoderInput.of_tokens(
            self.renderer.render_texts([parsed["prompt"]], max_tokens=max_tokens)[0].token_ids
        )

    @property
    def start_token_id(self) -> int:
        """The decoder start token, with which every decoder prompt begins. Raises CheckpointError
        where the checkpoint names none."""
        for key in ("decoder_start_token_id", "bos_token_id"):
            if (value := self.generation.get(key)) is not None:
                if type(value) is not int or not 0 <= value < (self.config.vocab_size or value + 1):
                    raise CheckpointError(f"{key} must be a token id of the model, not {value!r}.")
                return value
        raise CheckpointError(
            "neither generation_config.json nor config.json names a decoder_start_token_id."
        )

    def default_decoder_prompt(self) -> list[int]:
        """Default start of the decoder: the decoder start token, and any other tokens that the
        model always begins with."""
        return [self.start_token_id]

    def decoder_prompt(self, token_ids: Sequence[int]) -> list[int]:
        """Given token ids, with the decoder start token in front."""
        start = self.start_token_id
        return list(token_ids) if token_ids and token_ids[0] == start else [start, *token_ids]

    # Tokens that are drawn

    def forced_tokens(
        self, decoder_prompt: Sequence[int], max_output_tokens: int
    ) -> dict[int, int]:
        """Forces BOS and EOS by the rules of transformers."""
        begin, end = (
            self.generation.get(key) for key in ("forced_bos_token_id", "forced_eos_token_id")
        )
        forced = {0: begin} if begin is not None and len(decoder_prompt) == 1 else {}
        if end is not None:
            forced[max_output_tokens - 1] = end[0] if isinstance(end, list) else end
        return forced

    def bad_words(self) -> list[list[int]]:
        """Bad words that the checkpoint names. Marian's is its padding."""
        ends = [[token] for token in self.renderer.eos_token_ids]
        return [word for word in self.generation.get("bad_words_ids") or [] if word not in ends]


class T5GemmaRules(UsualRules):
    """Each side states the length of its own sequences."""

    encoder_length_keys = ("encoder.max_position_embeddings",)


class MBartRules(UsualRules):
    """The decoder begins with the start token, and the token that the checkpoint forces, if any:
    BART's first, mBART-50's language.

    Others begin with their language itself.
    """

    def default_decoder_prompt(self) -> list[int]:
        forced = self.generation.get("forced_bos_token_id")
        return [*super().default_decoder_prompt(), *([forced] if isinstance(forced, int) else [])]


def _moved(
    features: Sequence[MultiModalFeatureSpec], num_tokens: int
) -> list[MultiModalFeatureSpec]:
    """The items of a prompt that gets so many tokens in front."""
    return [
        structs.replace(
            feature,
            mm_position=structs.replace(
                feature.mm_position, offset=feature.mm_position.offset + num_tokens
            ),
        )
        for feature in features
    ]


def _text_of(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return prompt
    return prompt.get("prompt") if isinstance(prompt, Mapping) else None


def last_turn(messages: Conversation) -> str:
    """The text of the system messages and the last one. Raises RequestError."""
    if (
        isinstance(messages, str)
        or not messages
        or not all(isinstance(message, Mapping) for message in messages)
    ):
        raise RequestError("messages must be a list of at least one message.", "messages")
    read = [
        *(message for message in messages[:-1] if message.get("role") == "system"),
        messages[-1],
    ]
    return " ".join(_content(message.get("content")) for message in read)


def _content(content: Any) -> str:
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if any(not isinstance(text, str) for text in texts):
        raise RequestError(
            "a message's content must be a text, or a list of parts that are texts.", "messages"
        )
    return "\n".join(map(str, texts))
