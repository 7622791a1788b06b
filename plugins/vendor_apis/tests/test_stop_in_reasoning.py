"""A stop text that comes in the reasoning ends no answer, at every door that takes stop texts,
streamed or not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from toolkit_lm.outputs import CompletionOutput, RequestOutput
from toolkit_lm.params import RequestOutputKind
from toolkit_lm.processing.sequence_text import SequenceText
from toolkit_lm.processing.stop import StopTexts
from toolkit_lm.renderer import DecodeStream
from toolkit_lm_server.app import create_app
from toolkit_lm_server.options import ServerOptions

pytestmark = pytest.mark.anyio

TEXT = "<think>\nIs it Paris?\n</think>\n\nIt is Paris now."
MESSAGES = [{"role": "user", "content": "hi"}]
DOORS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "stop": "Paris"},
    "/v1/chat/completions/batch": {"messages": [MESSAGES], "stop": ["Paris"]},
    "/v1/responses": {"input": "hi", "stop": ["Paris"]},
    "/v1/messages": {
        "messages": MESSAGES,
        "max_tokens": 99,
        "stop_sequences": ["Paris"],
        "thinking": {"type": "enabled"},
    },
    "/v2/chat": {"messages": MESSAGES, "stop_sequences": ["Paris"]},
    "/api/chat": {"messages": MESSAGES, "options": {"stop": ["Paris"]}},
    "/api/generate": {"prompt": "hi", "options": {"stop": ["Paris"]}},
}
WHOLE_ONLY = ("/v1/chat/completions/batch",)
NOT_READ = ("/v1/completions", "/infill")
"""Routes of texts, of which nothing is reasoning."""
NO_EFFECT = ("/api/embed", "/api/embeddings", "/api/show", "/v1/messages/count_tokens")
TEXTS = ("content", "text", "reasoning_content", "thinking", "response", "delta")


class Characters(DecodeStream):
    """One character per token."""

    def push(self, token_ids):
        return "".join(map(chr, token_ids))

    def flush(self):
        return ""

    def decode_stream(self, prompt_token_ids=(), *, skip_special_tokens=True):
        return self


@pytest.fixture
def scripted(engines, monkeypatch):
    """The engine answers with TEXT, a character at a time, up to a stop text where it counts."""
    engine = engines["generate"]

    async def chat_many(conversations, params, *, options=None, **rendering):
        stops = StopTexts([params.stop] if isinstance(params.stop, str) else params.stop)
        text = SequenceText(params, Characters(), [], stops, options["stop_scope"]("assistant"))
        is_delta = params.output_kind is RequestOutputKind.DELTA
        num_shown = 0
        for at, character in enumerate(TEXT):
            text.push([ord(character)], may_stop=True)
            done = text.stopped_by is not None or at == len(TEXT) - 1
            if done:
                text.finish(may_stop=True)
            if is_delta or done:
                new, num_shown = "".join(text.shown[num_shown:]), len(text.shown)
                one = CompletionOutput(
                    0, new, [1], finish_reason="stop" if done else None, stop_reason=text.stopped_by
                )
                yield [(0, RequestOutput("id", None, [1], [one], done))]
            if done:
                return

    monkeypatch.setattr(engine, "chat_many", chat_many)


def said(value: Any) -> str:
    """All texts of an answer, in their order."""
    if isinstance(value, list):
        return "".join(map(said, value))
    if not isinstance(value, dict):
        return ""
    return "".join(
        one if name in TEXTS and isinstance(one, str) else said(one) for name, one in value.items()
    )


def test_every_door_that_takes_stop_texts_is_tried(engines):
    told = create_app(engines["generate"], ServerOptions()).openapi()
    schemas = told["components"]["schemas"]
    found = set()
    for path, methods in told["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        schema = content.get("application/json", {}).get("schema", {})
        body = schemas.get(schema.get("$ref", "").rpartition("/")[2], schema).get("properties", {})
        if {"stop", "stop_sequences"} & set(body) or (
            path.startswith("/api/") and "options" in body
        ):
            found.add(path)
    assert found == {*DOORS, *NOT_READ, *NO_EFFECT}


@pytest.mark.parametrize("path", DOORS)
async def test_a_stop_text_counts_in_the_content_alone(serve, scripted, path):
    async with serve(reasoning_parser="think") as client:
        for stream in (False,) if path in WHOLE_ONLY else (False, True):
            answer = await client.post(path, json={**DOORS[path], "stream": stream})
            assert answer.status_code == 200, answer.text
            if not stream:
                texts = said(answer.json())
            else:
                lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
                texts = said([json.loads(line) for line in lines if line.startswith("{")])
            assert "Is it Paris?" in texts, texts
            assert "It is" in texts and "Paris now" not in texts and "It is Paris" not in texts
