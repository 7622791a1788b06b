"""Memory costs of requests: upper bounds, computed before any work is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from toolkit_lm.params import SamplingParams

from toolkit_lm_serving.media_cost import Measure, is_item, items_of, media_cost

Cost = Mapping[str, int]
"""Bytes of memory in front and engine together, by the part of the request that needs them."""
AtOnce = Callable[[str], int]
"""Bytes of a text that are tokenized together: the signature of Renderer.tokenized_at_once."""

_CHARACTER = 24
"""Bytes of memory for each token id, or each UTF-8 byte of a text, while it is read, checked and
rendered."""
_TOKENIZING = 160
"""Bytes of memory for each byte that is being tokenized, if every byte becomes a token. The package
tokenizers allocates them."""
_AT_A_TIME = 2**19
"""Bytes of text that are tokenized together: short texts, or pieces of long ones."""
_SEQUENCE = 4096
"""Bytes of memory for a sequence."""
_LOGPROB = 256
"""Bytes of memory for the log probability of a token."""
_NUMBER = 40
"""Bytes of memory for a number of a result."""
_ENTRY = 40
"""Bytes of memory for an entry of a list, such as a token id."""
_MESSAGE = 64
"""Bytes of memory for a message without its content. Messages are read, checked and copied for the
template."""
_WRITTEN = 256
"""Messages of plain text that are written together, to count their characters."""
OPEN_END = 256
"""Tokens that a sequence without max_tokens is expected to have."""
_PER_TOKEN = 4
"""Bytes of text that a token has on average."""
_MEDIA = "images and other media"


def generation_cost(
    prompts: Sequence[object],
    params: SamplingParams,
    max_model_len: int,
    measure: Measure | None = None,
    at_once: AtOnce | None = None,
) -> Cost:
    """Returns the cost of prompts of one call that generate.

    `measure` returns the size of media items. `at_once` returns how many bytes of a text are
    tokenized together; None: all of them.
    """
    sizes = [_size(prompt) for prompt in prompts]
    prompt_bytes = sum(sizes)
    name, width = params.widest
    sequences = len(prompts) * width
    max_tokens = (
        max_model_len if params.max_tokens is None else min(params.max_tokens, max_model_len)
    )
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    rule_bytes = sum(map(len, params.bad_words or ())) + len(repr(params.of_processors))
    # The best of several are chosen by the log probabilities of their tokens.
    ranked = 0 if params.ranks and params.num_logprobs is None else params.num_logprobs
    entries = _entries(ranked) + len(params.logprob_token_ids or ())
    return {
        _MEDIA: sum(media_cost(prompt, measure) for prompt in prompts if _may_hold_media(prompt)),
        "prompt": prompt_bytes * (_CHARACTER + _ENTRY * width)
        + _tokenizing(prompts, sizes, at_once),
        f"prompts x {name}": sequences * _SEQUENCE,
        f"prompts x {name} x max_tokens": sequences * max_tokens * _ENTRY,
        f"prompts x {name} x max_tokens x logprobs": sequences * max_tokens * entries * _LOGPROB,
        "prompt x prompt_logprobs": min(prompt_bytes, len(prompts) * max_model_len)
        * _entries(params.prompt_logprobs)
        * _LOGPROB,
        f"prompts x {name} x stop": sum(map(len, stops)) * 4 + sequences * len(stops) * 8,
        "prompts x bad_words": len(prompts) * rule_bytes * 2 * _ENTRY,
        "prompts x allowed_token_ids": len(prompts)
        * len(params.allowed_token_ids or ())
        * 2
        * _ENTRY,
        "prompts x logit_bias": len(prompts) * len(params.logit_bias or ()) * 4 * _ENTRY,
    }


def rendering_cost(
    prompts: Sequence[object], measure: Measure | None = None, at_once: AtOnce | None = None
) -> Cost:
    """Returns the cost of prompts that are only rendered, all at the same time. A prompt may be a
    conversation with its options."""
    sizes = [_size(prompt) for prompt in prompts]
    tokenizing = sum(
        _tokenizing([prompt], [size], at_once) for prompt, size in zip(prompts, sizes, strict=True)
    )
    return {
        _MEDIA: sum(media_cost(prompt, measure) for prompt in prompts if _may_hold_media(prompt)),
        "prompt": sum(sizes) * (_CHARACTER + _ENTRY) + tokenizing,
    }


def pooling_cost(
    prompts: Sequence[object],
    *,
    cut: bool,
    size: int,
    per_token: bool,
    max_model_len: int,
    measure: Measure | None = None,
    at_once: AtOnce | None = None,
) -> Cost:
    """Returns the cost of prompts of one call that are pooled.

    `cut`: prompts are cut to max_model_len. `size`: count of numbers in a result; with `per_token`,
    in the result of each token.
    """
    sides = [
        side for prompt in prompts for side in (prompt if isinstance(prompt, tuple) else (prompt,))
    ]
    distinct = {id(side): side for side in sides}
    sizes = [_size(text) for text in distinct.values()]
    lengths = [min(length, max_model_len) if cut else length for length in map(_size, prompts)]
    # A picture has up to as many tokens as a prompt may have.
    lengths = [
        max_model_len if _reads_media(prompt) else length
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    vectors = sum(min(length, max_model_len) for length in lengths) if per_token else len(prompts)
    return {
        # An item is read for each pair that it is in.
        _MEDIA: sum(media_cost(side, measure) for side in sides if _reads_media(side)),
        "text": sum(sizes) * (_CHARACTER + _ENTRY)
        + _tokenizing(list(distinct.values()), sizes, at_once),
        "inputs x text": len(prompts) * _SEQUENCE + sum(lengths) * _ENTRY,
        "inputs x result": vectors * size * _NUMBER,
    }


def tokens_of(prompts: Sequence[object]) -> int:
    """Returns how many tokens prompts are expected to have: token ids as many as they are, texts by
    their bytes, media none."""
    return sum(
        _size(prompt) if _is_tokens(prompt) else _size(prompt) // _PER_TOKEN for prompt in prompts
    )


def _entries(asked: int | None) -> int:
    """Number of log probabilities for one token: its own, and those of the likeliest tokens."""
    return 0 if asked is None else asked + 1


def _tokenizing(prompts: Sequence[object], sizes: Sequence[int], at_once: AtOnce | None) -> int:
    """Bytes of memory for tokenizing prompts one after the other. Token ids need none."""
    texts = [
        (prompt, size)
        for prompt, size in zip(prompts, sizes, strict=True)
        if not _is_tokens(prompt)
    ]
    longest = max((_longest(prompt, size, at_once) for prompt, size in texts), default=0)
    return min(sum(size for _, size in texts), max(_AT_A_TIME, longest)) * _TOKENIZING


def _longest(prompt: object, size: int, at_once: AtOnce | None) -> int:
    """Bytes of a prompt that are tokenized together, of its `size` bytes."""
    if at_once is None or size <= _AT_A_TIME:
        return size
    # A chat template decides how a conversation becomes one text, so that counts as a whole.
    texts = list(_texts(prompt))
    whole = sum(map(_utf8, texts))
    return min(size, max(0, size - whole) + sum(map(at_once, texts)))


def _texts(prompt: object) -> Iterator[str]:
    """The texts of a prompt: one, or both sides of a pair."""
    if isinstance(prompt, str):
        yield prompt
    elif isinstance(prompt, tuple):
        for item in prompt:
            yield from _texts(item)
    elif isinstance(prompt, Mapping):
        for name in ("prompt", "encoder_prompt", "decoder_prompt"):
            yield from _texts(prompt.get(name))


def _is_tokens(prompt: object) -> bool:
    if isinstance(prompt, Mapping):
        return prompt.get("prompt_token_ids") is not None
    return isinstance(prompt, list) and (not prompt or isinstance(prompt[0], int))


def _utf8(text: str) -> int:
    """Bytes of a text in UTF-8. A tokenizer may make a token from each byte."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _size(prompt: object) -> int:
    """Approximate number of bytes of a text, or number of token ids."""
    if isinstance(prompt, tuple):
        return sum(map(_size, prompt))
    if isinstance(prompt, Mapping) and "encoder_prompt" in prompt:
        return _size(prompt["encoder_prompt"]) + _size(prompt.get("decoder_prompt") or "")
    if isinstance(prompt, Mapping) and "content" in prompt:
        return _message_size(prompt)
    if isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is not None:
        prompt = prompt["prompt_token_ids"]
    elif isinstance(prompt, Mapping) and isinstance(prompt.get("prompt"), str):
        prompt = prompt["prompt"]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        return _conversation_size(prompt)
    if isinstance(prompt, str):
        return _utf8(prompt)
    return len(prompt) if isinstance(prompt, list) else _utf8(repr(prompt))


def _may_hold_media(prompt: object) -> bool:
    """Whether a prompt may hold media: a mapping, or a conversation with content in parts."""
    if isinstance(prompt, tuple) and prompt and isinstance(prompt[0], list):
        return any(map(_has_parts, prompt[0]))
    return isinstance(prompt, Mapping)


def _reads_media(prompt: object) -> bool:
    """Whether a prompt to pool, or a side of a pair, has media that are read, or are read
    already."""
    if isinstance(prompt, tuple):
        return any(map(_reads_media, prompt))
    return isinstance(prompt, Mapping) and any(
        name in prompt for name in ("content", "multi_modal_data", "features")
    )


def _has_parts(message: object) -> bool:
    # A dict is found to be one without a look into the class registry of Mapping.
    return isinstance(message, (dict, Mapping)) and isinstance(message.get("content"), list)


def _conversation_size(messages: list[Any]) -> int:
    """The sum of the messages' `_message_size`. Those of plain text are written many at a time: the
    event loop waits for it."""
    total = 0
    for begin in range(0, len(messages), _WRITTEN):
        some = messages[begin : begin + _WRITTEN]
        if any(map(_has_parts, some)):
            total += sum(map(_message_size, some))
        else:
            # The list's own brackets and separators are two characters for each message.
            total += _utf8(repr(some)) + (_MESSAGE - 2) * len(some)
    return total


def _message_size(message: object) -> int:
    """The `_size` of a message without its media items, which may have megabytes."""
    if not _has_parts(message) or not any(True for _ in items_of(message)):
        return _utf8(repr(message)) + _MESSAGE
    assert isinstance(message, Mapping)
    texts = [part for part in message["content"] if not is_item(part)]
    return _utf8(repr({**message, "content": texts})) + _MESSAGE * len(message["content"])
