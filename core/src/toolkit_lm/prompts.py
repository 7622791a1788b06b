"""What a user may ask: text, tokens, conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from toolkit_lm.errors import RequestError


class TextPrompt(TypedDict):
    """A text, to be tokenized."""

    prompt: str


class TokensPrompt(TypedDict):
    """Token ids, used as they are. `prompt` may give their text, for the output only."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]


SingletonPrompt = str | TextPrompt | TokensPrompt
"""One text."""


class ExplicitEncoderDecoderPrompt(TypedDict):
    """What the encoder of an encoder-decoder model reads, and what its decoder begins with; any other prompt is for the encoder."""

    encoder_prompt: SingletonPrompt
    decoder_prompt: NotRequired[SingletonPrompt | None]
    """Text goes on after the model's default. To token ids the decoder start token is added in front, unless it is there."""


Prompt = SingletonPrompt | ExplicitEncoderDecoderPrompt
"""What `LLM.generate` takes."""

TextPair = tuple[str, str]
"""Two texts that a pooling model reads together: a query and a document."""

Message = Mapping[str, Any]
"""One message of a conversation, in OpenAI's shape: role, content, and what the chat template reads besides."""

Conversation = Sequence[Message]


def parse_prompt(prompt: Any) -> TextPrompt | TokensPrompt:
    """`prompt` in one of the two dict forms. Raises RequestError, naming what was given and what is allowed."""
    if isinstance(prompt, str):
        return TextPrompt(prompt=prompt)
    if not isinstance(prompt, Mapping):
        raise RequestError(
            f"a prompt must be a text, {{'prompt': text}} or {{'prompt_token_ids': [ids]}}, not a {type(prompt).__name__}.", "prompt"
        )
    if "encoder_prompt" in prompt or "decoder_prompt" in prompt:
        raise RequestError("only encoder-decoder models take an encoder prompt and a decoder prompt: give one prompt.", "prompt")
    unknown = set(prompt) - {"prompt", "prompt_token_ids"}
    if unknown:
        raise RequestError(f"a prompt has no key {sorted(map(str, unknown))[0]!r}. Known: prompt, prompt_token_ids.", "prompt")
    text = prompt.get("prompt")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"'prompt' must be a text, not a {type(text).__name__}.", "prompt")
    ids = prompt.get("prompt_token_ids")
    if ids is None:
        if text is None:
            raise RequestError("a prompt needs the key 'prompt' (text) or 'prompt_token_ids' (list of ids).", "prompt")
        return TextPrompt(prompt=text)
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence) or not all(type(i) is int for i in ids):
        raise RequestError("'prompt_token_ids' must be a list of integers.", "prompt_token_ids")
    parsed = TokensPrompt(prompt_token_ids=list(ids))
    if text is not None:
        parsed["prompt"] = text
    return parsed
