"""What a user may ask: text, tokens, conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict, cast

from toolkit_lm.errors import RequestError


class MediaPrompt(TypedDict, total=False):
    """Items of media that stand in a prompt: its placeholders say where."""

    multi_modal_data: Mapping[str, Any]
    """By modality, an item or a list of items: {"image": [...]}."""
    mm_processor_kwargs: Mapping[str, Any] | None
    """Options of the checkpoint's processor of media, for this prompt."""
    multi_modal_uuids: Mapping[str, Any] | None
    """By modality, the caller's own names of the items. Equal items of unlike names share
    nothing."""


class TextPrompt(MediaPrompt):
    """A text, to be tokenized."""

    prompt: str


class TokensPrompt(MediaPrompt):
    """Token ids, used as they are. `prompt` may give their text, for the output only."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]


SingletonPrompt = str | TextPrompt | TokensPrompt
"""One text. A bare list of token ids is taken, too."""


class ExplicitEncoderDecoderPrompt(TypedDict):
    """What the encoder of an encoder-decoder model reads, and what its decoder begins with; any
    other prompt is for the encoder."""

    encoder_prompt: SingletonPrompt
    decoder_prompt: NotRequired[SingletonPrompt | None]
    """Text goes on after the model's default. To token ids the decoder start token is added in
    front, unless it is there."""


Prompt = SingletonPrompt | ExplicitEncoderDecoderPrompt
"""What `LLM.generate` takes."""

TextPair = tuple[str, str]
"""Two texts that a pooling model reads together: a query and a document."""

Message = Mapping[str, Any]
"""One message of a conversation, in OpenAI's shape: role, content, and what the chat template reads
besides."""

Conversation = Sequence[Message]


_MEDIA = tuple(MediaPrompt.__annotations__)


def listed(prompts: Prompt | TextPair | Sequence[Prompt | TextPair]) -> list[Prompt | TextPair]:
    """One prompt, or a list of them, as a list. Raises RequestError for what is neither. A list of
    token ids is one prompt."""
    if not isinstance(prompts, str | Mapping | Sequence):
        raise RequestError(
            "prompts must be a text, a dict, a pair of texts or a list of these, not a "
            f"{type(prompts).__name__}.",
            "prompt",
        )
    given: Any = prompts
    is_one = isinstance(given, str | Mapping | tuple) or (len(given) > 0 and type(given[0]) is int)
    return [given] if is_one else list(given)


def parse_prompt(prompt: Any, *, media: bool = False) -> TextPrompt | TokensPrompt:
    """`prompt` in one of the two dict forms. Raises RequestError, naming what was given and what is
    allowed.

    `media`: items of media may stand in it. What they are is not looked at.
    """
    if isinstance(prompt, str):
        return TextPrompt(prompt=prompt)
    if isinstance(prompt, list) and prompt and type(prompt[0]) is int:
        prompt = {"prompt_token_ids": prompt}
    if not isinstance(prompt, Mapping):
        raise RequestError(
            f"a prompt must be a text, {{'prompt': text}} or {{'prompt_token_ids': [ids]}}, not "
            f"a {type(prompt).__name__}.",
            "prompt",
        )
    if "encoder_prompt" in prompt or "decoder_prompt" in prompt:
        raise RequestError(
            "only encoder-decoder models take an encoder prompt and a decoder prompt: give one "
            "prompt.",
            "prompt",
        )
    given = {name: prompt[name] for name in _MEDIA if prompt.get(name)}
    if given and not media:
        raise RequestError(
            "this model takes no images or other media here: give a prompt without.",
            next(iter(given)),
        )
    known = ("prompt", "prompt_token_ids", *_MEDIA)
    unknown = set(prompt) - {*known}
    if unknown:
        raise RequestError(
            f"a prompt has no key {sorted(map(str, unknown))[0]!r}. Known: {', '.join(known)}.",
            "prompt",
        )
    text = prompt.get("prompt")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"'prompt' must be a text, not a {type(text).__name__}.", "prompt")
    ids = prompt.get("prompt_token_ids")
    if ids is None:
        if text is None:
            raise RequestError(
                "a prompt needs the key 'prompt' (text) or 'prompt_token_ids' (list of ids).",
                "prompt",
            )
        return cast(TextPrompt, {"prompt": text, **given})
    if (
        isinstance(ids, str | bytes)
        or not isinstance(ids, Sequence)
        or not all(type(i) is int for i in ids)
    ):
        raise RequestError("'prompt_token_ids' must be a list of integers.", "prompt_token_ids")
    parsed = cast(TokensPrompt, {"prompt_token_ids": list(ids), **given})
    if text is not None:
        parsed["prompt"] = text
    return parsed
