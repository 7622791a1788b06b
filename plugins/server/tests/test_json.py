"""Bounds of the JSON in a request's body."""

from __future__ import annotations

import asyncio
import json
import random
import threading

import pytest
from toolkit_lm_server import json_body
from toolkit_lm_server.json_body import MAX_DEPTH
from toolkit_lm_server.limits import json_size
from toolkit_lm_server.limits.json_size import measure

pytestmark = pytest.mark.anyio
HI = {"messages": [{"role": "user", "content": "hi"}]}
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("part", [json_size._PART, 7])
async def test_the_measures_of_json(monkeypatch, part):
    def naive(value) -> tuple[int, int]:
        """Levels, and values and names; what is empty counts as if it had one."""
        if not isinstance(value, dict | list):
            return 0, 1
        inner = [naive(one) for one in (value.values() if isinstance(value, dict) else value)]
        names = len(value) if isinstance(value, dict) else 0
        return 1 + max((levels for levels, _ in inner), default=0), 1 + names + max(
            1, sum(values for _, values in inner)
        )

    draw = random.Random(1)
    texts = ["", "[{", '"', '\\"[,', "\\", "\\\\[", "é]:", ","]

    def value(levels):
        kind = draw.randrange(4) if levels else 0
        if kind == 0:
            return draw.choice([1, None, *texts])
        inner = [value(levels - 1) for _ in range(draw.randrange(4))]
        return (
            inner
            if kind == 1
            else {draw.choice(texts) + str(i): one for i, one in enumerate(inner)}
        )

    monkeypatch.setattr(json_size, "_PART", part)
    for _ in range(300):
        one = value(6)
        assert measure(json.dumps(one, ensure_ascii=draw.random() < 0.5).encode()) == naive(one), (
            one
        )


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ([5] * 262_139, None),
        ([5] * 262_140, 262_145),
        ("a,[{:" * 100_000, None),
        (["a,[{:"] * 200_000, None),
        ([[5, 6, 7]] * 100_000, 400_005),
    ],
)
async def test_how_many_values_json_may_have(client, value, number):
    reply = await client.post("/v1/completions", json={"prompt": value, "max_tokens": 1})
    message = reply.json()["error"]["message"]
    assert reply.status_code == 400
    told = (
        f"it has {number} values and names, and may have 262144, one for 64 bytes that a body may "
        "have (max_body_size). Send its parts in several requests"
    )
    assert (message == f"The body is not valid JSON: {told}.") == (number is not None), message


async def test_small_bodies_do_not_wait_for_large_ones(client, monkeypatch):
    begun = threading.Event()
    go_on = threading.Event()
    parse = json_body._parse

    def slow(body, most):
        if len(body) > 100_000:
            begun.set()
            assert go_on.wait(30)
        return parse(body, most)

    monkeypatch.setattr(json_body, "_parse", slow)
    large = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "a " * 100_000}))
    await asyncio.to_thread(begun.wait, 30)
    assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
    assert (await client.get("/health")).status_code == 200 and not large.done()
    go_on.set()
    assert (await large).status_code in (200, 400)


@pytest.mark.parametrize("excess", [0, 1])
async def test_how_deep_json_may_be(client, excess):
    levels = MAX_DEPTH - 2 + excess
    text = json.dumps({**HI, "chat_template_kwargs": {"a": 0}}).replace(
        '"a": 0', '"a": ' + "[" * levels + "]" * levels
    )
    reply = await client.post("/v1/chat/completions", content=text, headers=JSON)
    assert reply.status_code == (400 if excess else 200)
    if excess:
        assert (
            reply.json()["error"]["message"]
            == "The body is not valid JSON: it is nested more than 100 levels deep."
        )


@pytest.mark.parametrize(
    ("text", "why"), [(b"NaN", "NaN is not a number in JSON"), (b'"\xff"', "it is not UTF-8")]
)
async def test_what_is_no_json_is_named(client, text, why):
    body = (
        b'{"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"a": %b}}'
        % text
    )
    reply = await client.post("/v1/chat/completions", content=body, headers=JSON)
    assert (reply.status_code, reply.json()["error"]["message"]) == (
        400,
        f"The body is not valid JSON: {why}.",
    )


async def test_a_byte_order_mark_is_no_error(client):
    reply = await client.post(
        "/v1/completions", content=b'\xef\xbb\xbf{"prompt": "a"}', headers=JSON
    )
    assert reply.status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "br, gzip", "unknown"])
async def test_a_compressed_body_is_refused(client, engine, encoding):
    reply = await client.post(
        "/v1/completions", content=b"\x1f\x8b", headers={**JSON, "content-encoding": encoding}
    )
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (415, "unsupported_encoding") and repr(
        encoding
    ) in error["message"]
    plain = await client.post(
        "/v1/completions",
        content=b'{"prompt": "a"}',
        headers={**JSON, "content-encoding": "identity"},
    )
    assert plain.status_code == 200
