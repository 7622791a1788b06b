"""Fields of OpenAI's and others' requests that say little: verbosity, service_tier, timings, marks
of a last message; and the system_fingerprint of answers."""

from __future__ import annotations

import json

import pytest
from toolkit_lm.errors import RequestError
from toolkit_lm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from toolkit_lm_server.app import create_app
from toolkit_lm_server.fingerprint import fingerprint_of
from toolkit_lm_server.generation import Generation
from toolkit_lm_server.prefills import prefilled

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
IGNORED = "x-ignored-fields"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


def chunks_of(response) -> list[dict]:
    frames = response.text.rstrip("\n").split("\n\n")
    assert frames[-1] == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]


async def test_the_fingerprint_is_of_the_configuration(client, make_engine, client_of):
    whole = (await client.post(CHAT, json=HI)).json()["system_fingerprint"]
    stream = chunks_of(await client.post(CHAT, json={**HI, "stream": True}))
    plain = (await client.post("/v1/completions", json={"prompt": "hi"})).json()
    streamed = chunks_of(
        await client.post("/v1/completions", json={"prompt": "hi", "stream": True})
    )
    found = {answer["system_fingerprint"] for answer in (*stream, plain, *streamed)}
    assert found == {whole} and whole.startswith("fp_") and len(whole) == 15
    assert fingerprint_of(make_engine()) == whole
    assert fingerprint_of(make_engine(max_model_len=32)) != whole
    async with client_of(create_app(make_engine(max_model_len=32))) as other:
        assert (await other.post(CHAT, json=HI)).json()["system_fingerprint"] != whole


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
async def test_verbosity_is_told_where_no_template_reads_it(client, path):
    def body(value):
        if path == CHAT:
            return {**HI, "verbosity": value}
        return {"input": "hi", "text": {"verbosity": value}}

    name = "verbosity" if path == CHAT else "text.verbosity"
    reply = await client.post(path, json=body("low"))
    assert (reply.status_code, reply.headers[IGNORED]) == (200, name)
    assert IGNORED not in (await client.post(path, json=body("medium"))).headers
    reply = await client.post(path, json=body(7))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)


async def test_verbosity_goes_to_a_template_that_reads_it(client, engine, monkeypatch):
    kind = type(engine.renderer)
    monkeypatch.setattr(kind, "template_names", frozenset({"verbosity"}))
    reply = await client.post(CHAT, json={**HI, "verbosity": "low"})
    assert reply.status_code == 200 and IGNORED not in reply.headers
    assert engine.renderer.kwargs["chat_template_kwargs"] == {"verbosity": "low"}
    await client.post(
        CHAT, json={**HI, "verbosity": "low", "chat_template_kwargs": {"verbosity": "high"}}
    )
    assert engine.renderer.kwargs["chat_template_kwargs"] == {"verbosity": "high"}


async def test_a_chat_is_not_stored(client):
    assert (await client.post(CHAT, json={**HI, "store": True})).headers[IGNORED] == "store"
    assert IGNORED not in (await client.post(CHAT, json={**HI, "store": False})).headers


async def test_the_tier_is_the_default_one(client):
    assert "service_tier" not in (await client.post(CHAT, json=HI)).json()
    body = {**HI, "service_tier": "flex"}
    assert (await client.post(CHAT, json=body)).json()["service_tier"] == "default"
    found = chunks_of(await client.post(CHAT, json={**body, "stream": True}))
    assert {chunk["service_tier"] for chunk in found} == {"default"}


@pytest.mark.parametrize("mark", ["prefix", "partial"])
async def test_a_marked_message_is_continued(client, engine, mark):
    messages = [*HI["messages"], {"role": "assistant", "content": "He", mark: True}]
    reply = await client.post(CHAT, json={**HI, "messages": messages})
    assert reply.status_code == 200, reply.text
    assert engine.renderer.kwargs["continue_final_message"] is True
    # Without a mark, the answer is a message of its own, as in OpenAI's and vLLM's API.
    messages[-1].pop(mark)
    await client.post(CHAT, json={**HI, "messages": messages})
    assert engine.renderer.kwargs["continue_final_message"] is False


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "hi", "prefix": True}],
        [
            {"role": "assistant", "content": "a", "prefix": True},
            {"role": "user", "content": "hi"},
        ],
    ],
)
async def test_a_mark_in_another_place_is_refused(client, messages):
    error = (await client.post(CHAT, json={**HI, "messages": messages})).json()["error"]
    assert "messages[0].prefix" in error["message"] and error["param"] == "messages"


def test_conversations_of_a_request_are_marked_together():
    bare = [{"role": "assistant", "content": "a", "prefix": False}]
    marked = [{"role": "assistant", "content": "a", "prefix": True}]
    assert prefilled([bare], {"x": 1}) == ([bare], {"x": 1})
    messages, options = prefilled([marked], {"x": 1})
    assert messages == [[{"role": "assistant", "content": "a"}]]
    assert options == {"x": 1, "continue_final_message": True}
    with pytest.raises(RequestError, match="all conversations"):
        prefilled([bare, marked], {})


async def test_timings_come_where_they_are_asked_for(client):
    assert "timings" not in (await client.post(CHAT, json=HI)).json()
    for path, body in ((CHAT, HI), ("/v1/completions", {"prompt": "hi"})):
        # This engine keeps no times.
        for name in ("timings", "timings_per_token"):
            assert (await client.post(path, json={**body, name: True})).json()["timings"] is None
        found = chunks_of(await client.post(path, json={**body, "timings": True, "stream": True}))
        assert any("timings" in chunk for chunk in found)
    for path, body in (("/v1/responses", {"input": "hi"}), ("/infill", {"input_prefix": "a"})):
        error = (await client.post(path, json={**body, "timings": True})).json()["error"]
        assert error["message"].startswith("timings is for")


async def test_timings_are_of_the_engine():
    metrics = RequestMetrics(arrival_time=10.0, first_token_ts=10.5, last_token_ts=12.5)
    output = RequestOutput(
        "id",
        None,
        [5, 6, 7],
        [CompletionOutput(0, "abcde", [1, 2, 3, 4, 5], None, finish_reason="stop")],
        True,
        num_cached_tokens=1,
        metrics=metrics,
    )

    async def rest():
        return
        yield

    generation = Generation([(0, output)], rest(), 1, 1)
    assert generation.timings() is None, "nothing is read yet"
    await generation.choices()
    assert generation.timings() == {
        "cache_n": 1,
        "prompt_n": 2,
        "prompt_ms": 500.0,
        "prompt_per_token_ms": 250.0,
        "prompt_per_second": 4.0,
        "predicted_n": 5,
        "predicted_ms": 2000.0,
        "predicted_per_token_ms": 500.0,
        "predicted_per_second": 2.0,
    }
