"""What a request can come to cost: an upper bound, told before any work is done for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from toolkit_lm.params import SamplingParams

from toolkit_lm_serving.media_cost import Measure, is_item, items_of, media_cost

Cost = Mapping[str, int]
"""Bytes of memory in front and engine together, by what asks for them."""
AtOnce = Callable[[str], int]
"""Renderer.tokenized_at_once."""

_CHARACTER = 24
"""Bytes of memory for each byte of a text, in UTF-8, or token id, while it is read, checked and
rendered."""
_TOKENIZING = 160
"""Bytes more for each that is tokenized at a time, where each is a token: what the package
tokenizers keeps of them."""
_AT_A_TIME = 2**19
"""Bytes of short texts, or pieces of long ones, that are tokenized together."""
_SEQUENCE = 4096
_LOGPROB = 256
_NUMBER = 40
"""Bytes of memory for a number of a result."""
_ENTRY = 40
"""Bytes of memory for an entry of a list: a token id, say."""
_MESSAGE = 64
"""Bytes that a message of a conversation counts as, beside its own: it is read, checked and copied
for the template."""
_MEDIA = "images and other media"


def generation_cost(
    prompts: Sequence[object],
    params: SamplingParams,
    max_model_len: int,
    measure: Measure | None = None,
    at_once: AtOnce | None = None,
) -> Cost:
    """Of prompts that generate, in one call.

    `measure`: tells what items of media take. `at_once`: how much of a text is tokenized at a time;
    None: all.
    """
    sizes = [_size(prompt) for prompt in prompts]
    of_prompts = sum(sizes)
    name, width = params.widest
    sequences = len(prompts) * width
    most = max_model_len if params.max_tokens is None else min(params.max_tokens, max_model_len)
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    words = sum(map(len, params.bad_words or ())) + len(repr(params.of_processors))
    # The best of several are chosen by the log probabilities of their tokens.
    ranked = 0 if params.ranks and params.num_logprobs is None else params.num_logprobs
    entries = _entries(ranked) + len(params.logprob_token_ids or ())
    return {
        _MEDIA: sum(media_cost(prompt, measure) for prompt in prompts if _may_hold_media(prompt)),
        "prompt": of_prompts * (_CHARACTER + _ENTRY * width) + _tokenizing(prompts, sizes, at_once),
        f"prompts x {name}": sequences * _SEQUENCE,
        f"prompts x {name} x max_tokens": sequences * most * _ENTRY,
        f"prompts x {name} x max_tokens x logprobs": sequences * most * entries * _LOGPROB,
        "prompt x prompt_logprobs": min(of_prompts, len(prompts) * max_model_len)
        * _entries(params.prompt_logprobs)
        * _LOGPROB,
        f"prompts x {name} x stop": sum(map(len, stops)) * 4 + sequences * len(stops) * 8,
        "prompts x bad_words": len(prompts) * words * 2 * _ENTRY,
        "prompts x allowed_token_ids": len(prompts)
        * len(params.allowed_token_ids or ())
        * 2
        * _ENTRY,
        "prompts x logit_bias": len(prompts) * len(params.logit_bias or ()) * 4 * _ENTRY,
    }


def rendering_cost(
    prompts: Sequence[object], measure: Measure | None = None, at_once: AtOnce | None = None
) -> Cost:
    """Of prompts, or conversations with their options, that are rendered only: side by side."""
    sizes = [_size(prompt) for prompt in prompts]
    tokenizing = sum(
        _tokenizing([one], [size], at_once) for one, size in zip(prompts, sizes, strict=True)
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
    at_once: AtOnce | None = None,
) -> Cost:
    """Of prompts that are pooled, in one call.

    `cut`: they are cut to max_model_len at most. `size`: numbers of a result, or, with `per_token`,
    of each token's.
    """
    distinct = {
        id(text): text
        for prompt in prompts
        for text in (prompt if isinstance(prompt, tuple) else (prompt,))
    }
    sizes = [_size(text) for text in distinct.values()]
    lengths = [min(length, max_model_len) if cut else length for length in map(_size, prompts)]
    vectors = sum(min(length, max_model_len) for length in lengths) if per_token else len(prompts)
    return {
        "text": sum(sizes) * (_CHARACTER + _ENTRY)
        + _tokenizing(list(distinct.values()), sizes, at_once),
        "inputs x text": len(prompts) * _SEQUENCE + sum(lengths) * _ENTRY,
        "inputs x result": vectors * size * _NUMBER,
    }


def _entries(asked: int | None) -> int:
    """Log probabilities of one token: its own, and those of the likeliest."""
    return 0 if asked is None else asked + 1


def _tokenizing(given: Sequence[object], sizes: Sequence[int], at_once: AtOnce | None) -> int:
    """Bytes of memory that it takes to tokenize prompts one after the other. Token ids take
    nothing."""
    texts = [(one, size) for one, size in zip(given, sizes, strict=True) if not _is_tokens(one)]
    longest = max((_longest(one, size, at_once) for one, size in texts), default=0)
    return min(sum(size for _, size in texts), max(_AT_A_TIME, longest)) * _TOKENIZING


def _longest(given: object, size: int, at_once: AtOnce | None) -> int:
    """Bytes of a prompt of this size that are tokenized at a time."""
    if at_once is None or size <= _AT_A_TIME:
        return size
    # A template writes a conversation in its own way: where its text is cut depends on all that is
    # in it.
    texts = list(_texts(given))
    whole = sum(map(_utf8, texts))
    return min(size, max(0, size - whole) + sum(map(at_once, texts)))


def _texts(given: object) -> Iterator[str]:
    """The prompt, or both sides of it."""
    if isinstance(given, str):
        yield given
    elif isinstance(given, tuple):
        for one in given:
            yield from _texts(one)
    elif isinstance(given, Mapping):
        for name in ("prompt", "encoder_prompt", "decoder_prompt"):
            yield from _texts(given.get(name))


def _is_tokens(given: object) -> bool:
    if isinstance(given, Mapping):
        return given.get("prompt_token_ids") is not None
    return isinstance(given, list) and (not given or isinstance(given[0], int))


def _utf8(text: str) -> int:
    """Bytes of a text. A tokenizer may make a token of each."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _size(given: object) -> int:
    """Bytes of a text, or token ids, about."""
    if isinstance(given, tuple):
        return sum(map(_size, given))
    if isinstance(given, Mapping) and "encoder_prompt" in given:
        return _size(given["encoder_prompt"]) + _size(given.get("decoder_prompt") or "")
    if isinstance(given, Mapping) and given.get("prompt_token_ids") is not None:
        given = given["prompt_token_ids"]
    elif isinstance(given, Mapping) and isinstance(given.get("prompt"), str):
        given = given["prompt"]
    if isinstance(given, list) and given and isinstance(given[0], dict):
        return sum(map(_message_size, given))
    if isinstance(given, str):
        return _utf8(given)
    return len(given) if isinstance(given, list) else _utf8(repr(given))


def _may_hold_media(given: object) -> bool:
    """It is a mapping, or a conversation with content in parts."""
    if isinstance(given, tuple) and given and isinstance(given[0], list):
        return any(map(_has_parts, given[0]))
    return isinstance(given, Mapping)


def _has_parts(message: object) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("content"), list)


def _message_size(message: object) -> int:
    """As `_size`, without items of media, which may be files of megabytes."""
    if not _has_parts(message) or not any(True for _ in items_of(message)):
        return _utf8(repr(message)) + _MESSAGE
    assert isinstance(message, Mapping)
    texts = [part for part in message["content"] if not is_item(part)]
    return _utf8(repr({**message, "content": texts})) + _MESSAGE * len(message["content"])
