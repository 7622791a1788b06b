"""Log probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llm_toolkit.outputs import Logprob

_LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def chat_logprobs(token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]], top: int) -> dict[str, Any]:
    """Of chat completions: per token its own entry, and the `top` likeliest ones in order."""
    content = []
    for token_id, candidates in zip(token_ids, logprobs, strict=True):
        likeliest = sorted((one for one in candidates.values() if one.rank <= top), key=lambda one: one.rank)
        content.append({**_entry(candidates[token_id]), "top_logprobs": [_entry(one) for one in likeliest]})
    return {"content": content, "refusal": None}


def completion_logprobs(token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]], top: int, text_offset: int) -> dict[str, Any]:
    """Of plain completions: parallel lists. `text_offset`: characters before the first of these tokens."""
    tokens = [_text(candidates[token_id]) for token_id, candidates in zip(token_ids, logprobs, strict=True)]
    offsets = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    chosen = [_value(candidates[token_id]) for token_id, candidates in zip(token_ids, logprobs, strict=True)]
    # The chosen token is in its own table, even where it is not among the likeliest.
    tables = [
        {_text(one): _value(one) for token, one in candidates.items() if one.rank <= top or token == token_id}
        for token_id, candidates in zip(token_ids, logprobs, strict=True)
    ]
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tables if top else None, "text_offset": offsets}


def _entry(one: Logprob) -> dict[str, Any]:
    return {"token": _text(one), "logprob": _value(one), "bytes": list(_text(one).encode())}


def _text(one: Logprob) -> str:
    return one.decoded_token or ""


def _value(one: Logprob) -> float:
    return max(one.logprob, _LEAST)
