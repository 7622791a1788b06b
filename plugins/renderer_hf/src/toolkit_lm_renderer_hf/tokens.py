"""TokenRenderer: token ids in, token ids out, for checkpoints without a tokenizer, and for callers
that have their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, RequestError
from toolkit_lm.prompts import Conversation, SingletonPrompt, parse_prompt
from toolkit_lm.renderer import DecodeStream, Rendered, Renderer

from toolkit_lm_renderer_hf.end_tokens import end_tokens, text_config


class TokenRenderer(Renderer):
    """Reads no tokenizer. Prompts are token ids, and outputs have token ids and no text."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        size = config.vocab_size or text_config(config.hf_config).get("vocab_size")
        if not isinstance(size, int):
            raise CheckpointError("config.json states no vocab_size.")
        self._vocab_size = size
        self._eos_token_ids = end_tokens(config, None, size)

    def render_conversation(self, messages: Conversation, **kwargs: Any) -> Rendered:
        _refuse("messages")

    @property
    def has_text(self) -> bool:
        return False

    @property
    def has_chat_template(self) -> bool:
        return False

    def render_prompt(
        self, prompt: SingletonPrompt, *, add_special_tokens: bool = True
    ) -> Rendered:
        parsed = {"prompt": prompt} if isinstance(prompt, str) else parse_prompt(prompt)
        token_ids = parsed.get("prompt_token_ids")
        if not isinstance(token_ids, list):
            _refuse("prompt")
        if not token_ids:
            raise RequestError(
                "the prompt is empty: it needs at least one token.", "prompt_token_ids"
            )
        return Rendered(token_ids)

    def decode_stream(
        self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> DecodeStream:
        return _NoText()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return ""

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Names of tokens without text, in vLLM's form: "token_id:7"."""
        return [f"token_id:{token_id}" for token_id in token_ids]

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> list[int]:
        return list(self._eos_token_ids)


class _NoText(DecodeStream):
    def push(self, token_ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


def _refuse(param: str) -> NoReturn:
    raise RequestError(
        "this engine takes token ids, and no text (renderer='tokens'): give prompt_token_ids.",
        param,
    )
