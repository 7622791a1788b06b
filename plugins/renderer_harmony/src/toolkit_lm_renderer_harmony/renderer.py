"""HarmonyRenderer: prompts and conversations become token ids, token ids become text, by
openai-harmony."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError, RequestError, nearest
from toolkit_lm.prompts import Conversation, SingletonPrompt, parse_prompt
from toolkit_lm.renderer import DecodeStream, Rendered, Renderer

from toolkit_lm_renderer_harmony.bounds import TextBudget, refusals
from toolkit_lm_renderer_harmony.chat import Chat
from toolkit_lm_renderer_harmony.vocabulary import load_encoding, missing

_MAX_CHARS = 1 << 20
"""Most characters of one text: about a second of work."""
_LONGEST = 128
"""Characters of the longest token."""
_CHAT_OPTIONS = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")
_FIRST_SPECIAL = 199_998
_SIZE = 201_088
"""Ids of special tokens, and how many ids there are."""


class HarmonyRenderer(Renderer):
    """Text renderer of gpt-oss.

    Raises CheckpointError for a missing or another vocabulary, ConfigError where `refuses` has a
    reason.
    """

    @classmethod
    def refuses(cls, config: VllmConfig) -> str | None:
        if config.renderer.chat_template is not None:
            return "harmony has no chat template that chat_template could replace"
        return missing()

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        assert config.checkpoint is not None, "the config is not resolved: it has no checkpoint"
        if (reason := self.refuses(config)) is not None:
            raise ConfigError(f"renderer 'harmony': {reason}.")
        self._encoding = load_encoding(Path(config.renderer.tokenizer or config.checkpoint.path))
        self._max_chars = max(_MAX_CHARS, config.max_model_len * _LONGEST)
        self._pieces: dict[int, bytes] = {}
        stated = [
            config.checkpoint.generation_config.get("eos_token_id"),
            config.hf_config.get("eos_token_id"),
        ]
        listed = [
            text
            for value in stated
            if value is not None
            for text in (value if isinstance(value, list) else [value])
        ]
        if any(type(text) is not int for text in listed):
            raise CheckpointError(
                f"eos_token_id must be a token id or a list of them, not {listed!r:.100}."
            )
        self._eos_token_ids = [
            *dict.fromkeys([*listed, *sorted(self._encoding.stop_tokens_for_assistant_actions())])
        ]

    def render_conversation(self, messages: Conversation, **kwargs: Any) -> Rendered:
        for name in kwargs:
            if name not in _CHAT_OPTIONS:
                raise RequestError(
                    f"render_conversation takes no option {name!r}. {nearest(name, _CHAT_OPTIONS)}",
                    name,
                )
        import openai_harmony as harmony

        goes_on = kwargs.get("continue_final_message", False)
        generates = kwargs.get("add_generation_prompt", not goes_on)
        if goes_on and generates:
            raise RequestError(
                "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
                "continue_final_message",
            )
        chat = Chat(self._max_chars).read(
            messages, kwargs.get("tools"), kwargs.get("chat_template_kwargs")
        )
        if goes_on and (chat[-1]["role"], chat[-1].get("channel")) != ("assistant", "final"):
            raise RequestError(
                "continue_final_message needs a final message of the assistant, with content.",
                "continue_final_message",
            )
        with refusals("messages"):
            conversation = harmony.Conversation.from_messages(
                [harmony.Message.from_dict(message) for message in chat]
            )
            if generates:
                return Rendered(
                    list(
                        self._encoding.render_conversation_for_completion(
                            conversation, harmony.Role.ASSISTANT
                        )
                    )
                )
            # The assistant's reasoning stays: a later message decides whether it is removed.
            token_ids = list(
                self._encoding.render_conversation(
                    conversation, harmony.RenderConversationConfig(auto_drop_analysis=False)
                )
            )
        # The last token ends the message.
        return Rendered(token_ids[:-1] if goes_on else token_ids)

    @property
    def chat_template_source(self) -> str:
        return "<|start|>assistant<|channel|>analysis<|message|>"

    def render_prompt(
        self, prompt: SingletonPrompt, *, add_special_tokens: bool = True
    ) -> Rendered:
        """Tokens of a plain text. Names of special tokens in it are read as text. The format adds
        no special tokens."""
        parsed = parse_prompt(prompt)
        token_ids = parsed.get("prompt_token_ids")
        if token_ids is not None:
            if not token_ids:
                raise RequestError("the prompt is empty.", "prompt_token_ids")
            return Rendered(cast(list[int], token_ids))
        text = parsed["prompt"]
        if not text:
            raise RequestError("the prompt is empty.", "prompt")
        TextBudget("the prompt", self._max_chars).spend(text, "prompt")
        with refusals("prompt"):
            return Rendered(list(self._encoding.encode(text, disallowed_special=())))

    def decode_stream(
        self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> DecodeStream:
        return TextStream(self, skip_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self.bytes_of(token_ids, skip_special_tokens).decode("utf-8", "replace")

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return [self.decode([token_id]) for token_id in token_ids]

    def token_bytes(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> list[bytes]:
        return [self.bytes_of([token_id], skip_special_tokens) for token_id in token_ids]

    def bytes_of(self, token_ids: Sequence[int], skip_special_tokens: bool) -> bytes:
        """Bytes of these tokens together. Ids without a token are skipped."""
        end = _FIRST_SPECIAL if skip_special_tokens else _SIZE
        return b"".join(self._piece(token_id) for token_id in token_ids if 0 <= token_id < end)

    def _piece(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            # Bytes that are no UTF-8 pass through Python's text and come back.
            piece = self._pieces[token_id] = self._encoding.decode(
                [token_id], errors="surrogateescape"
            ).encode("utf-8", "surrogateescape")
        return piece

    @property
    def vocab_size(self) -> int:
        stated = self.config.hf_config.get("vocab_size")
        return max(_SIZE, stated if isinstance(stated, int) else 0)

    @property
    def eos_token_ids(self) -> list[int]:
        return list(self._eos_token_ids)


class TextStream(DecodeStream):
    """The text of one sequence as its tokens come."""

    def __init__(self, renderer: HarmonyRenderer, skip_special_tokens: bool) -> None:
        self._renderer = renderer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(self._renderer.bytes_of(token_ids, self._skip_special_tokens))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)
