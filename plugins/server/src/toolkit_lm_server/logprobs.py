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
"""The text before a token's id, where the id stands for the token."""
_LEAST = -9999.0
"""The value for minus infinity, which JSON cannot express."""


TokenBytes = Callable[[Sequence[int]], list[bytes]]
"""The signature of Renderer.token_bytes."""


def chat_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[dict[int, Logprob]],
    top: int,
    token_bytes: TokenBytes,
    named: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Log probabilities of chat completions. Each token has its own entry and the `top` likeliest
    ones, in order. `named`, where given, lists the tokens that are told beside the token itself
    instead."""
    content = []
    for token_id, candidates in zip(token_ids, logprobs, strict=True):
        others = (
            [other for other, logprob in candidates.items() if logprob.rank <= top]
            if named is None
            else {token_id, *named}
        )
        likeliest = sorted(others, key=lambda other: candidates[other].rank)
        entries = [
            _entry(token, candidates[token], token_bytes) for token in (token_id, *likeliest)
        ]
        content.append({**entries[0], "top_logprobs": entries[1:]})
    return {"content": content, "refusal": None}


class TextPlaces:
    """Places of tokens in a text, in characters. A character is one of its last byte's token."""

    def __init__(self, start: int = 0) -> None:
        """`start`: characters before the first token."""
        self._place = start
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def place(self, token: bytes) -> int:
        """The place of the next token, which has these bytes."""
        found = self._place
        self._place += len(self._utf8.decode(token))
        return found


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[dict[int, Logprob]],
    top: int,
    places: TextPlaces,
    token_bytes: TokenBytes,
    named: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Log probabilities of plain completions, as parallel lists. `places`: those of the tokens
    before, to which these are added. `named`: token ids that are told in place of the `top`
    likeliest."""
    made: dict[str, Any] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token_id, candidates in zip(token_ids, logprobs, strict=True):
        # The chosen token is in its own table, even where it is not among the likeliest.
        listed = {
            other: logprob
            for other, logprob in candidates.items()
            if (logprob.rank <= top if named is None else other in named)
        }
        shown = {token_id: candidates[token_id]} | listed
        table: dict[str, float] = {}
        for other, logprob in shown.items():
            name = token_name(other, _text(logprob), token_bytes)
            # Two tokens may have one text.
            table[f"{ID_MARK}{other}" if name in table else name] = _value(logprob)
        made["tokens"].append(next(iter(table)))
        made["token_logprobs"].append(_value(candidates[token_id]))
        made["top_logprobs"].append(table)
        data = _bytes(token_id, _text(candidates[token_id]), token_bytes)
        made["text_offset"].append(places.place(data))
    return made


def token_name(token_id: int, text: str, token_bytes: TokenBytes) -> str:
    """A token's name in plain completions: its text. A part of a character has its bytes in
    OpenAI's form instead, "bytes:\\xf0"."""
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
    """Log probabilities of a prompt, in the shape of plain completions. The first token has none.

    `first`: that token's text. `name`: its text or its id, as it is told.
    """
    known = [logprob for logprob in logprobs if logprob is not None]
    places = TextPlaces()
    start = places.place(_bytes(prompt[0], first, token_bytes))
    rest = completion_logprobs(prompt[1:], known, top, places, token_bytes)
    token = token_name(prompt[0], name, token_bytes)
    return joined(
        {
            "tokens": [token],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [start],
        },
        rest,
    )


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The lists of two parts of a text, joined in order."""
    return {name: values + second[name] for name, values in first.items()}


def prompt_logprobs(
    logprobs: Sequence[dict[int, Logprob] | None] | None,
) -> list[dict[str, Any] | None] | None:
    """Log probabilities of a prompt in vLLM's shape: per token None, or entries by token id."""
    if logprobs is None:
        return None
    return [
        None
        if logprob is None
        else {str(token): _ranked(candidate) for token, candidate in logprob.items()}
        for logprob in logprobs
    ]


def _ranked(logprob: Logprob) -> dict[str, Any]:
    return {
        "logprob": _value(logprob),
        "rank": logprob.rank,
        "decoded_token": logprob.decoded_token,
    }


def _entry(token_id: int, logprob: Logprob, token_bytes: TokenBytes) -> dict[str, Any]:
    text = _text(logprob)
    return {
        "token": text,
        "logprob": _value(logprob),
        "bytes": list(_bytes(token_id, text, token_bytes)),
    }


def _bytes(token_id: int, text: str, token_bytes: TokenBytes) -> bytes:
    """The bytes of a token. A part of a character has no text, and an id says nothing of it."""
    has_text = "\ufffd" not in text and not text.startswith(ID_MARK)
    return text.encode() if has_text else token_bytes([token_id])[0]


def _text(logprob: Logprob) -> str:
    return logprob.decoded_token or ""


def _value(logprob: Logprob) -> float:
    return max(logprob.logprob, _LEAST)


def settle_logprobs(engine: ServingEngine, body: SamplingBody) -> None:
    """Replaces a body's -1 log probabilities by the size of the vocabulary. max_logprobs bounds
    it."""
    for name in ("prompt_logprobs", "top_logprobs", "logprobs"):
        if type(value := getattr(body, name, None)) is int and value == -1:
            setattr(body, name, engine.config.vocab_size or engine.renderer.vocab_size)
