"""Log probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from toolkit_lm.outputs import Logprob

if TYPE_CHECKING:
    from toolkit_lm_serving.engine import ServingEngine

    from toolkit_lm_server.protocol import SamplingBody

ID_MARK = "token_id:"
"""What comes before the id of a token that is named by it."""
_LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


TokenBytes = Callable[[Sequence[int]], list[bytes]]
"""As Renderer.token_bytes."""


def chat_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[dict[int, Logprob]],
    top: int,
    token_bytes: TokenBytes,
    named: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Of chat completions: per token its own entry, and the `top` likeliest ones in order, or in
    their place it and those `named`."""
    content = []
    for token_id, candidates in zip(token_ids, logprobs, strict=True):
        others = (
            [other for other, one in candidates.items() if one.rank <= top]
            if named is None
            else {token_id, *named}
        )
        likeliest = sorted(others, key=lambda other: candidates[other].rank)
        entries = [_entry(one, candidates[one], token_bytes) for one in (token_id, *likeliest)]
        content.append({**entries[0], "top_logprobs": entries[1:]})
    return {"content": content, "refusal": None}


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[dict[int, Logprob]],
    top: int,
    text_offset: int,
    token_bytes: TokenBytes,
    named: Sequence[int] | None = None,
    begun: bytes = b"",
) -> dict[str, Any]:
    """Of plain completions: parallel lists. `text_offset`: characters before the first of these
    tokens.

    `named`: token ids that are told in the place of the `top` likeliest. `begun`: the first bytes
    of a character that these tokens end.
    """
    made: dict[str, Any] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    utf8 = _utf8()
    utf8.decode(begun)
    for token_id, candidates in zip(token_ids, logprobs, strict=True):
        # The chosen token is in its own table, even where it is not among the likeliest.
        told = {
            other: one
            for other, one in candidates.items()
            if (one.rank <= top if named is None else other in named)
        }
        shown = {token_id: candidates[token_id]} | told
        table: dict[str, float] = {}
        for other, one in shown.items():
            name = token_name(other, _text(one), token_bytes)
            # Two tokens may have one text.
            table[f"{ID_MARK}{other}" if name in table else name] = _value(one)
        made["tokens"].append(next(iter(table)))
        made["token_logprobs"].append(_value(candidates[token_id]))
        made["top_logprobs"].append(table)
        made["text_offset"].append(text_offset)
        text_offset += len(utf8.decode(_bytes(token_id, _text(candidates[token_id]), token_bytes)))
    return made


def token_name(token_id: int, text: str, token_bytes: TokenBytes) -> str:
    """Of plain completions: the token's text, or its bytes where it is part of a character, as
    OpenAI writes them: "bytes:\\xf0"."""
    if "\ufffd" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes([token_id])[0])


def echo_logprobs(
    prompt: Sequence[int],
    logprobs: Sequence[dict[int, Logprob] | None],
    top: int,
    first: str,
    name: str,
    token_bytes: TokenBytes,
) -> dict[str, Any]:
    """Of a prompt, in the shape of plain completions: nothing comes before its first token.

    `first`: that token's text. `name`: what it is called, its text or its id.
    """
    known = [one for one in logprobs if one is not None]
    utf8 = _utf8()
    length = len(utf8.decode(_bytes(prompt[0], first, token_bytes)))
    rest = completion_logprobs(
        prompt[1:], known, top, length, token_bytes, begun=utf8.getstate()[0]
    )
    told = token_name(prompt[0], name, token_bytes)
    return joined(
        {"tokens": [told], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]},
        rest,
    )


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The lists of two parts of a text, one after the other."""
    return {name: values + second[name] for name, values in first.items()}


def prompt_logprobs(
    logprobs: Sequence[dict[int, Logprob] | None] | None,
) -> list[dict[str, Any] | None] | None:
    """In vLLM's shape: per prompt token None, or by token id."""
    if logprobs is None:
        return None
    return [
        None
        if one is None
        else {str(token): _ranked(candidate) for token, candidate in one.items()}
        for one in logprobs
    ]


def _ranked(one: Logprob) -> dict[str, Any]:
    return {"logprob": _value(one), "rank": one.rank, "decoded_token": one.decoded_token}


def _entry(token_id: int, one: Logprob, token_bytes: TokenBytes) -> dict[str, Any]:
    text = _text(one)
    return {
        "token": text,
        "logprob": _value(one),
        "bytes": list(_bytes(token_id, text, token_bytes)),
    }


def _utf8() -> codecs.IncrementalDecoder:
    """A character is one of the text when its last byte comes."""
    return codecs.getincrementaldecoder("utf-8")("replace")


def _bytes(token_id: int, text: str, token_bytes: TokenBytes) -> bytes:
    """A part of a character has no text, and a token's id is none."""
    has_text = "\ufffd" not in text and not text.startswith(ID_MARK)
    return text.encode() if has_text else token_bytes([token_id])[0]


def _text(one: Logprob) -> str:
    return one.decoded_token or ""


def _value(one: Logprob) -> float:
    return max(one.logprob, _LEAST)


def settle_logprobs(engine: ServingEngine, body: SamplingBody) -> None:
    """Where a body asks for -1 log probabilities, it wants them of the whole vocabulary.
    max_logprobs is what bounds it."""
    for name in ("prompt_logprobs", "top_logprobs", "logprobs"):
        if type(value := getattr(body, name, None)) is int and value == -1:
            setattr(body, name, engine.config.vocab_size or engine.renderer.vocab_size)
