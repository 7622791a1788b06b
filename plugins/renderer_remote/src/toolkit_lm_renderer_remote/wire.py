"""The wire form of a rendered prompt, as render servers send it: JSON, with arrays in base64, or
msgpack.

`schema()` is its JSON Schema, which docs/renderer.schema.json holds. A render server need not be
Python.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field
from toolkit_lm.messages import MultiModalFeatureSpec

MSGPACK = ("application/msgpack", "application/x-msgpack")
"""Media types of answers that a client may accept in addition to application/json."""
RENDER_CHAT = "/v1/chat/completions/render"
RENDER_PROMPTS = "/v1/completions/render"
TOKENIZE = "/tokenize"


class RenderedPrompt(Struct, kw_only=True):
    """A prompt, or a conversation, in tokens."""

    token_ids: list[int]
    features: list[MultiModalFeatureSpec] | None = None
    """Items of media among the tokens, by offset; none overlap. `data` is null where the request's
    `held` has the identifier."""
    model: str | None = None
    sampling_params: dict[str, Any] = field(default_factory=dict)
    """Parameters of the request that differ from their defaults."""
    max_model_len: int | None = None


class RenderedPrompts(Struct, kw_only=True):
    """Several of them, of one request."""

    data: list[RenderedPrompt]


class TokenizedText(Struct, kw_only=True):
    """Answer of /tokenize."""

    tokens: list[int]


class Derendered(Struct, kw_only=True):
    """Answer of /derender: the text that tokens add to a prompt."""

    text: str


class ErrorDetail(Struct, kw_only=True):
    message: str
    param: str | None = None
    """The field of the request that is wrong, where it is one."""
    code: str | None = None
    """"context_length_exceeded" for a prompt that is too long."""


class ErrorAnswer(Struct, kw_only=True):
    """With the status 400, what is wrong with a request. Other statuses say that the server is to
    blame."""

    error: ErrorDetail


ANSWERS = (RenderedPrompt, RenderedPrompts, TokenizedText, Derendered, ErrorAnswer)


def schema() -> dict[str, Any]:
    """The JSON Schema of all answers: `$defs` has one for each, and for their parts."""
    about = (
        "As JSON; in msgpack, `data` of an Array is binary. An Array is in C order and "
        "little-endian, its dtype numpy's name."
    )
    _, parts = msgspec.json.schema_components(ANSWERS, ref_template="#/$defs/{name}")
    for part in parts.values():
        # Line breaks in docstrings follow the source.
        if "description" in part:
            part["description"] = " ".join(part["description"].split())
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Answers of render servers",
        "description": about,
        "$defs": parts,
    }


def write_schema(path: str) -> None:
    """Writes it where it is published."""
    Path(path).write_text(json.dumps(schema(), indent=2) + "\n", encoding="utf-8")
