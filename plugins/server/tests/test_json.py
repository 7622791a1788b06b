"""Bounds of the JSON in a request's body."""

from __future__ import annotations

import json
import random

import pytest
from toolkit_lm_server.route import MAX_DEPTH, depth

pytestmark = pytest.mark.anyio
HI = {"messages": [{"role": "user", "content": "hi"}]}
JSON = {"content-type": "application/json"}


async def test_the_depth_of_json():
    def naive(value) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if inner is None else 1 + max(map(naive, inner), default=0)

    draw = random.Random(1)
    texts = ["", "[{", '"', '\\"[', "\\", "\\\\[", "é]"]

    def value(levels):
        kind = draw.randrange(4) if levels else 0
        if kind == 0:
            return draw.choice([1, None, *texts])
        inner = [value(levels - 1) for _ in range(draw.randrange(4))]
        return inner if kind == 1 else {draw.choice(texts) + str(i): one for i, one in enumerate(inner)}

    for _ in range(300):
        one = value(6)
        assert depth(json.dumps(one, ensure_ascii=draw.random() < 0.5).encode()) == naive(one), one


@pytest.mark.parametrize("excess", [0, 1])
async def test_how_deep_json_may_be(client, excess):
    levels = MAX_DEPTH - 2 + excess
    text = json.dumps({**HI, "chat_template_kwargs": {"a": 0}}).replace('"a": 0', '"a": ' + "[" * levels + "]" * levels)
    reply = await client.post("/v1/chat/completions", content=text, headers=JSON)
    assert reply.status_code == (400 if excess else 200)
    if excess:
        assert reply.json()["error"]["message"] == "The body is not valid JSON: it is nested more than 100 levels deep."


@pytest.mark.parametrize(("text", "why"), [(b"NaN", "NaN is not a number in JSON"), (b'"\xff"', "it is not UTF-8")])
async def test_what_is_no_json_is_named(client, text, why):
    body = b'{"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"a": %b}}' % text
    reply = await client.post("/v1/chat/completions", content=body, headers=JSON)
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, f"The body is not valid JSON: {why}.")


async def test_a_byte_order_mark_is_no_error(client):
    reply = await client.post("/v1/completions", content=b'\xef\xbb\xbf{"prompt": "a"}', headers=JSON)
    assert reply.status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "br, gzip", "unknown"])
async def test_a_compressed_body_is_refused(client, engine, encoding):
    reply = await client.post("/v1/completions", content=b"\x1f\x8b", headers={**JSON, "content-encoding": encoding})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (415, "unsupported_encoding") and repr(encoding) in error["message"]
    plain = await client.post("/v1/completions", content=b'{"prompt": "a"}', headers={**JSON, "content-encoding": "identity"})
    assert plain.status_code == 200
