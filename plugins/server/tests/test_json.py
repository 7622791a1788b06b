"""Bounds of the JSON in a request's body."""

from __future__ import annotations

import asyncio
import json
import random
import threading

import msgspec
import pytest
from pydantic import BaseModel, ValidationError
from toolkit_lm_server import json_body
from toolkit_lm_server.fields import Items
from toolkit_lm_server.json_body import MAX_DEPTH, ManyItems
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


@pytest.mark.parametrize("indent", [None, 1])
async def test_json_is_decoded_in_pieces_to_the_same(monkeypatch, indent):
    draw = random.Random(2)

    def value(levels):
        kind = draw.randrange(4) if levels else 0
        if kind == 0:
            return draw.choice([1, -2.5, None, True, "", "a,[{", '"', "é", "\\[", 2**63])
        inner = [value(levels - 1) for _ in range(draw.randrange(4))]
        return inner if kind == 1 else {f"a{i}": found for i, found in enumerate(inner)}

    monkeypatch.setattr(json_body, "_TOGETHER", 12)
    for _ in range(500):
        whole = value(7)
        body = json.dumps(whole, indent=indent, ensure_ascii=draw.random() < 0.5).encode()
        assert json_body._decoded(body) == whole == json.loads(body)
        wrong = bytearray(body)
        wrong[draw.randrange(len(wrong))] = ord(draw.choice('"[]{},:1'))
        found: list[object] = []
        for decode in (json_body._decoded, msgspec.json.decode):
            try:
                found.append(decode(bytes(wrong)))
            except (msgspec.DecodeError, UnicodeDecodeError):
                found.append("wrong")
        assert found[0] == found[1], wrong


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(
    "value",
    [
        {"messages": [{"role": "user", "content": "a"}] * 20_000},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 20_000}]},
        [["a"] * 10 for _ in range(20_000)],
    ],
    ids=["messages", "parts", "lists"],
)
async def test_other_threads_run_between_the_pieces_of_a_large_body(monkeypatch, value, indent):
    body = json.dumps(value, indent=indent).encode()
    sizes = []
    decode = msgspec.json.decode

    def sized(part):
        sizes.append(memoryview(part).nbytes)
        return decode(part)

    monkeypatch.setattr(msgspec.json, "decode", sized)
    assert json_body._decoded(body) == value
    assert max(sizes) <= 2 * json_body._TOGETHER and sum(sizes) > len(body) * 0.9


async def test_a_long_list_is_checked_in_pieces_to_the_same():
    class Pieces(BaseModel):
        items: ManyItems[dict[str, int]]

    class Whole(BaseModel):
        items: Items[dict[str, int]]

    good = [{"a": number} for number in range(5000)]
    assert Pieces.model_validate({"items": good}).items == good
    for wrong in ([*good, {"a": "b"}], [*good[:1500], 1, *good, 2], [{"a": "b"}], 5, None):
        told = []
        for kind in (Pieces, Whole):
            with pytest.raises(ValidationError) as caught:
                kind.model_validate({"items": wrong})
            told.append([(error["loc"], error["msg"]) for error in caught.value.errors()])
        assert told[0] == told[1]
    assert Pieces.model_json_schema()["properties"] == Whole.model_json_schema()["properties"]


async def test_a_conversation_of_more_messages_than_tokens_is_refused_unrendered(client, engine):
    """To render 50,000 takes half a second of a processor."""
    rendered = []
    engine.chat_many = lambda conversations, *_, **__: rendered.append(conversations)
    messages = [{"role": "user", "content": "a"}] * 65
    for path in ("/v1/chat/completions", "/v1/responses"):
        field = "messages" if path == "/v1/chat/completions" else "input"
        reply = await client.post(path, json={field: messages})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["message"].startswith(
            "a conversation of 65 turns is refused before it is rendered, where this model's "
            "maximum context length is 64 tokens (max_model_len)."
        )
    assert not rendered
    # Prompts that are cut may have any number.
    body = {"messages": messages, "truncate_prompt_tokens": 4}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 500
    assert rendered == [[messages]]


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
