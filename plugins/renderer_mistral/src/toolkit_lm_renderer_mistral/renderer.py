"""MistralRenderer: prompts and conversations become token ids, token ids become text, by
mistral-common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    RequestError,
    nearest,
)
from toolkit_lm.prompts import Conversation, SingletonPrompt, parse_prompt
from toolkit_lm.renderer import DecodeStream, Rendered, Renderer

from toolkit_lm_renderer_mistral.chat import Chat
from toolkit_lm_renderer_mistral.detokenizer import Detokenizer, TextStream
from toolkit_lm_renderer_mistral.end_tokens import end_tokens, text_config
from toolkit_lm_renderer_mistral.plain import check_unicode
from toolkit_lm_renderer_mistral.refusal import refusals
from toolkit_lm_renderer_mistral.tekken import load_tekken, missing

_MAX_CHARS = 1 << 20
"""Most characters of one text: about a second of work."""
_CHAT_OPTIONS = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")


class MistralRenderer(Renderer):
    """Text renderer for a checkpoint with a tekken.json.

    Raises CheckpointError for a missing or broken file, ConfigError where `refuses` has a reason.
    """

    @classmethod
    def refuses(cls, config: VllmConfig) -> str | None:
        if config.renderer.chat_template is not None:
            return "mistral-common has no chat template that chat_template could replace"
        return missing()

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        assert config.checkpoint is not None, "the config is not resolved: it has no checkpoint"
        if (reason := self.refuses(config)) is not None:
            raise ConfigError(f"renderer 'mistral': {reason}.")
        tokenizer = load_tekken(Path(config.renderer.tokenizer or config.checkpoint.path))
        self._tekken = tokenizer.instruct_tokenizer.tokenizer
        self._detokenizer = Detokenizer(self._tekken)
        stated = text_config(config.hf_config).get("vocab_size") or 0
        if not isinstance(stated, int):
            raise CheckpointError("config.json: vocab_size must be an integer.")
        self._vocab_size: int = max(self._tekken.n_words, stated)
        self._max_chars = max(
            _MAX_CHARS, config.max_model_len * max(map(len, self._tekken.vocab()), default=1)
        )
        self._chat = Chat(tokenizer, self._max_chars)
        self._eos_token_ids = end_tokens(
            config, self._tekken.eos_id, config.vocab_size or self._vocab_size
        )

    def render_conversation(self, messages: Conversation, **kwargs: Any) -> Rendered:
        for name in kwargs:
            if name not in _CHAT_OPTIONS:
                raise RequestError(
                    f"render_conversation takes no option {name!r}. {nearest(name, _CHAT_OPTIONS)}",
                    name,
                )
        return Rendered(self._chat.encode(messages, **kwargs))

    @property
    def chat_template_source(self) -> str:
        return self.decode(range(self._tekken.num_special_tokens))

    def render_prompt(
        self, prompt: SingletonPrompt, *, add_special_tokens: bool = True
    ) -> Rendered:
        parsed = parse_prompt(prompt)
        token_ids = parsed.get("prompt_token_ids")
        if token_ids is None:
            return Rendered(self._encode(parsed["prompt"], add_special_tokens))
        if not token_ids:
            raise RequestError("the prompt is empty.", "prompt_token_ids")
        return Rendered(cast(list[int], token_ids))

    def decode_stream(
        self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> DecodeStream:
        return TextStream(self._detokenizer, skip_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._detokenizer.decode(token_ids, skip_special_tokens)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return [
            self._detokenizer.decode([token_id], skip_special_tokens=False)
            for token_id in token_ids
        ]

    def token_bytes(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> list[bytes]:
        return [
            self._detokenizer.bytes_of([token_id], skip_special_tokens) for token_id in token_ids
        ]

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> list[int]:
        return list(self._eos_token_ids)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if not text:
            raise RequestError("the prompt is empty.", "prompt")
        if len(text) > self._max_chars:
            raise ContextLengthError(
                f"the prompt has {len(text)} characters; no more than {self._max_chars} are "
                "tokenized.",
                "prompt",
            )
        check_unicode(text, "the prompt", "prompt")
        with refusals("prompt"):
            return list(self._tekken.encode(text, bos=add_special_tokens, eos=False))
