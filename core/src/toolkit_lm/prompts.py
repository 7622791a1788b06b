"""Types of users' input: texts, tokens, conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict, cast

from toolkit_lm.errors import RequestError


class MediaPrompt(TypedDict, total=False):
    """Multimodal items of a prompt. The prompt's placeholders state their positions."""

    multi_modal_data: Mapping[str, Any]
    """An item or a list of items, by modality: {"image": [...]}."""
    mm_processor_kwargs: Mapping[str, Any] | None
    """Options of the checkpoint's media processor, for this prompt."""
    multi_modal_uuids: Mapping[str, Any] | None
    """The caller's own identifiers of the items, by modality. Equal items with different
    identifiers share no cache. An item that is None in `multi_modal_data`, or not there, is the one
    given before with its identifier."""


class TextPrompt(MediaPrompt):
    """A text, to be tokenized."""

    prompt: str


class TokensPrompt(MediaPrompt):
    """Token ids, used as they are. `prompt` may give their text, which only the output shows."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    features: NotRequired[Any]
    """Multimodal items among the token ids, as in Rendered. Only pooling takes them."""


SingletonPrompt = str | TextPrompt | TokensPrompt
"""One prompt for one sequence. A bare list of token ids is accepted, too."""


class ExplicitEncoderDecoderPrompt(TypedDict):
    """Prompts for both sides of an encoder-decoder model: the encoder's input, and the beginning of
    the decoder's output. Any other prompt is for the encoder."""

    encoder_prompt: SingletonPrompt
    decoder_prompt: NotRequired[SingletonPrompt | None]
    """Beginning of the output. Text is appended to the model's default. Token ids get the decoder
    start token in front, unless they have it."""


Prompt = SingletonPrompt | ExplicitEncoderDecoderPrompt
"""Prompts that `LLM.generate` accepts."""

TextPair = tuple[str, str]
"""Two texts that a pooling model reads together: a query and a document."""

Scored = str | Mapping[str, Any]
"""One side of a pair to score: a text; or a prompt with media, {"multi_modal_data": ...}; or the
content of a message, {"content": [...]}."""

Message = Mapping[str, Any]
"""One message of a conversation, in OpenAI's form: role, content, and what else the chat template
reads."""

Conversation = Sequence[Message]


_MEDIA = tuple(MediaPrompt.__annotations__)


def listed(prompts: Prompt | TextPair | Sequence[Prompt | TextPair]) -> list[Prompt | TextPair]:
    """Converts one prompt, or a list of them, to a list. Raises RequestError for another value. A
    list of token ids is one prompt."""
    if not isinstance(prompts, str | Mapping | Sequence):
        raise RequestError(
            "prompts must be a text, a dict, a pair of texts or a list of these, not a "
            f"{type(prompts).__name__}.",
            "prompt",
        )
    value: Any = prompts
    is_one = isinstance(value, str | Mapping | tuple) or (len(value) > 0 and type(value[0]) is int)
    return [value] if is_one else list(value)


def parse_prompt(prompt: Any, *, media: bool = False) -> TextPrompt | TokensPrompt:
    """Converts `prompt` to one of the two dict forms. Raises RequestError, which names the given
    value and the allowed ones.

    `media`: the prompt may have multimodal items, which are not checked here.
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
    present = {name: prompt[name] for name in _MEDIA if prompt.get(name)}
    if present and not media:
        raise RequestError(
            "this model takes no images or other media here: give a prompt without.",
            next(iter(present)),
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
        return cast(TextPrompt, {"prompt": text, **present})
    if (
        isinstance(ids, str | bytes)
        or not isinstance(ids, Sequence)
        or not all(type(i) is int for i in ids)
    ):
        raise RequestError("'prompt_token_ids' must be a list of integers.", "prompt_token_ids")
    parsed = cast(TokensPrompt, {"prompt_token_ids": list(ids), **present})
    if text is not None:
        parsed["prompt"] = text
    return parsed


def check_count(values: Sequence[object], param: str, count: int) -> None:
    """Raises RequestError unless there is one entry per prompt."""
    if len(values) != count:
        raise RequestError(
            f"{param} has {len(values)} entries for {count} prompts: give one for each.", param
        )


def each_of(value: object, name: str, count: int) -> list[Any]:
    """Returns one value for each of `count` requests. Raises RequestError for another number of
    values."""
    if not isinstance(value, list | tuple):
        return [value] * count
    check_count(value, name, count)
    return list(value)
