"""POST /v1/responses over a fake engine: shapes, events, what is refused, what is kept."""

from __future__ import annotations

import asyncio
import json
from typing import ClassVar

import pytest
from toolkit_lm_server.app import create_app
from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.responses.background import Background
from toolkit_lm_server.responses.body import ResponsesBody
from toolkit_lm_server.responses.items import chat_tools, messages_of
from toolkit_lm_server.responses.output import Output
from toolkit_lm_server.responses.replay import replayed
from toolkit_lm_server.responses.store import ResponseStore
from toolkit_lm_server.tools import tool_use

pytestmark = pytest.mark.anyio
PATH = "/v1/responses"


def events_of(response) -> list[dict]:
    """Checks the frames."""
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for frame in response.text.rstrip("\n").split("\n\n"):
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == [*range(len(found))]
    return found


async def test_a_whole_answer(client, engine):
    body = {
        "input": "hi",
        "instructions": "short",
        "model": "fake",
        "temperature": 0.5,
        "max_output_tokens": 64,
        "metadata": {"a": "b"},
        "top_k": 5,
    }
    reply = (await client.post(PATH, json=body)).json()
    assert (reply["object"], reply["status"], reply["error"], reply["incomplete_details"]) == (
        "response",
        "completed",
        None,
        None,
    )
    [message] = reply["output"]
    assert (message["type"], message["role"], message["status"]) == (
        "message",
        "assistant",
        "completed",
    )
    assert message["content"] == [
        {"type": "output_text", "text": "SYSTEM:SHORT;USER:HI;", "annotations": [], "logprobs": []}
    ]
    assert (reply["metadata"], reply["store"], reply["instructions"], reply["temperature"]) == (
        {"a": "b"},
        False,
        "short",
        0.5,
    )
    assert (
        reply["usage"]["input_tokens"] == reply["usage"]["output_tokens"] == 21
        and reply["usage"]["total_tokens"] == 42
    )
    [(_, params, _)] = engine.asked
    assert (params.max_tokens, params.temperature, params.top_k) == (64, 0.5, 5)


async def test_events(client):
    found = events_of(
        await client.post(PATH, json={"input": "hi", "stream": True, "max_output_tokens": 2})
    )
    assert [event["type"].removeprefix("response.") for event in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["delta"] for event in found if "delta" in event] == ["U", "S"]
    assert {event["item_id"] for event in found if "item_id" in event} == {found[2]["item"]["id"]}
    assert (
        found[2]["item"]["content"] == [] and found[8]["item"] == found[-1]["response"]["output"][0]
    )
    assert found[-1]["response"]["usage"]["output_tokens"] == 2
    assert len({event["response"]["id"] for event in found if "response" in event}) == 1


async def test_log_probabilities(client):
    body = {"input": "hi", "max_output_tokens": 1, "top_logprobs": 2}
    [message] = (await client.post(PATH, json=body)).json()["output"]
    [token] = message["content"][0]["logprobs"]
    assert (token["token"], len(token["top_logprobs"])) == ("U", 2)
    found = events_of(await client.post(PATH, json={**body, "stream": True}))
    assert [event["logprobs"] for event in found if "delta" in event["type"]] == [[token]]


async def test_an_answer_that_is_cut_by_its_timeout(client):
    reply = (await client.post(PATH, json={"input": "hi", "timeout": 9})).json()
    assert (reply["status"], reply["incomplete_details"], reply["output"][0]["status"]) == (
        "incomplete",
        {"reason": "timeout"},
        "incomplete",
    )


async def test_a_failure_in_the_middle(client, engine):
    """A stream tells of it as an event; else it is an error."""
    engine.failure = RuntimeError("secret")
    final = events_of(await client.post(PATH, json={"input": "hi", "stream": True}))[-1]
    assert (final["type"], final["response"]["status"]) == ("response.failed", "failed")
    assert final["response"]["error"] == {
        "code": "server_error",
        "message": "The server failed on this request.",
    }
    assert (await client.post(PATH, json={"input": "hi"})).status_code == 500


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": []}, "input", "empty list"),
        ({"input": [{"role": "user", "content": 3}]}, "input", r"input[0]: the content must be"),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input",
            "input[0]: items of type 'item_reference'",
        ),
        (
            {"input": "hi", "tools": [{"type": "a b"}]},
            "tools",
            'tools[0]: its type must be "function" or "custom"',
        ),
        ({"input": "hi", "tool_choice": "required"}, "tool_choice", "only with tools"),
        ({"input": "hi", "background": True}, "background", "(max_stored_responses)"),
        (
            {"input": "hi", "background": True, "stream": True},
            "background",
            "only when stream is false",
        ),
        (
            {"input": "hi", "enable_response_messages": True, "stream": True},
            "enable_response_messages",
            "only when stream is false",
        ),
        ({"input": "hi", "conversation": "conv_1"}, "conversation", "keeps no conversations"),
        (
            {"input": "hi", "previous_response_id": "resp_1"},
            "previous_response_id",
            "(max_stored_responses)",
        ),
        ({"input": "hi", "max_output_tokens": 0}, "max_tokens", "at least 1"),
        ({"input": "hi", "n": 2}, "n", "one answer"),
        ({"input": "hi", "metadata": {"a": 1}}, "metadata", "texts"),
        ({"input": "hi", "text": {"format": {"type": 3}}}, "text.format", "json_schema"),
        ({"input": [{"role": "bad", "content": "x"}]}, "input", "refuses this conversation"),
    ],
)
async def test_what_is_refused(client, body, param, message):
    response = await client.post(PATH, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]


@pytest.mark.parametrize(
    "field",
    [
        {"input": "\ud800"},
        {"instructions": "\ud800"},
        {"metadata": {"\ud800": "a"}},
        {"reasoning": {"effort": "\ud800"}},
        {"text": {"format": {"type": "\ud800"}}},
        {"tools": [{"type": "function", "name": "\ud800"}], "tool_choice": "none"},
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_what_comes_back_is_whole_characters(client, field, stream):
    content = json.dumps({"input": "hi", "stream": stream, **field})
    response = await client.post(
        PATH, content=content, headers={"content-type": "application/json"}
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(field)))


def test_items_are_messages():
    call = {
        "type": "function_call",
        "call_id": "call_1",
        "name": "f",
        "arguments": "{}",
        "id": "fc_1",
        "status": "completed",
    }
    items = [
        {"role": "developer", "content": "short"},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "see"},
                {"type": "input_image", "image_url": "data:x", "detail": "low"},
            ],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look", "annotations": []}],
        },
        call,
        {**call, "call_id": "call_2"},
        {"type": "function_call_output", "call_id": "call_1", "output": "3"},
    ]
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for number in (1, 2)
    ]
    assert messages_of(items) == [
        {"role": "developer", "content": "short"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}},
            ],
        },
        {"role": "assistant", "reasoning_content": "hm", "content": "I look", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]


def test_reasoning_without_a_text_is_no_message():
    """Clients send back what they got: an item whose reasoning was not told, or is encrypted."""
    ask = {"role": "user", "content": "hi"}
    untold = {"type": "reasoning", "summary": [], "encrypted_content": None}
    said = {"role": "assistant", "content": "so"}
    assert messages_of([ask, untold, said, untold, ask]) == [ask, said, ask]
    cut = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    assert messages_of([ask, cut, ask])[1] == {
        "role": "assistant",
        "reasoning_content": "hm",
        "content": "",
    }, "templates read a content"


def test_tools_are_those_of_a_chat():
    tools = chat_tools(
        [
            {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": True}
            for name in "fg"
        ]
    )
    assert tools[0] == {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object"}, "strict": True},
    }
    use = tool_use(tools, {"type": "function", "name": "g"}, None)
    assert (use.tools, use.callable, use.required) == (tools, tools[1:], True)
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "g"}, {"type": "web_search"}],
    }
    use = tool_use(tools, allowed, None)
    assert (use.tools, use.callable, use.required, use.parallel) == (tools, tools[1:], True, True)


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_that_are_kept(engine, client_of, stream):
    async with client_of(create_app(engine, ServerOptions(max_stored_responses=2))) as client:

        async def ask(**body):
            response = await client.post(
                PATH, json={"input": "hi", "stream": stream, "max_output_tokens": 1, **body}
            )
            return (
                events_of(response)[-1]["response"]
                if stream and response.status_code == 200
                else response.json()
            )

        first = await ask(instructions="short")
        assert first["store"] is True
        assert (await client.get(f"{PATH}/{first['id']}")).json() == first
        second = await ask(previous_response_id=first["id"], input="so")
        # Instructions are those of one response, and do not go on.
        assert (
            engine.renderer.decode(engine.asked[-1][0]["prompt_token_ids"])
            == "user:hi;assistant:S;user:so;"
        )
        third = await ask()
        cancelled = await client.post(f"{PATH}/{third['id']}/cancel")
        assert (cancelled.status_code, cancelled.json()["error"]["param"]) == (
            400,
            "response_id",
        ), "it is made already"
        assert (await client.post(f"{PATH}/{first['id']}/cancel")).status_code == 404
        gone = await client.get(f"{PATH}/{first['id']}")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "response_not_found"), (
            "only the latest are kept"
        )
        assert (await ask(previous_response_id=first["id"]))["error"][
            "param"
        ] == "previous_response_id"
        assert (await client.delete(f"{PATH}/{second['id']}")).json() == {
            "id": second["id"],
            "object": "response",
            "deleted": True,
        }
        assert (await client.delete(f"{PATH}/{second['id']}")).status_code == 404
        assert (await ask(store=False))["store"] is False
        assert (await client.get(f"{PATH}/{third['id']}")).status_code == 200


def test_what_is_kept_is_bounded_and_ones_own():
    store = ResponseStore(10, most_bytes=150)
    store.add({"id": "a"}, [[{"role": "user", "content": "x" * 50}]], "alice")
    assert store.turns("a", "alice") == [[{"role": "user", "content": "x" * 50}]]
    assert store.turns("a", "bob") is store.response("a", "bob") is None and not store.remove(
        "a", "bob"
    )
    store.add({"id": "b"}, [[{"role": "user", "content": "x" * 50}]], "alice")
    assert store.response("a", "alice") is None and store.response("b", "alice") == b'{"id":"b"}'
    store.add({"id": "c"}, [[{"role": "user", "content": "x" * 500}]], "alice")
    assert store.response("c", "alice") is None, "it is larger than all that is kept"


def test_who_keeps_much_pushes_out_nobody_else():
    store = ResponseStore(10)
    store.add({"id": "kept"}, [], "bob")
    for number in range(50):
        store.add({"id": f"{number}"}, [], "alice")
    assert (
        store.response("kept", "bob")
        and not store.response("40", "alice")
        and store.response("41", "alice")
    )
    store = ResponseStore(1000, most_bytes=1000)
    store.add({"id": "kept"}, [], "bob")
    for number in range(50):
        store.add({"id": f"{number}"}, [[{"role": "user", "content": "x" * 100}]], "alice")
    assert (
        store.response("kept", "bob")
        and store.response("49", "alice")
        and not store.response("0", "alice")
    )


class Said:
    """An answer with reasoning, a text and two calls, as chunks or whole."""

    CALLS = (("call_a", "f", '{"x": 1}'), ("call_b", "g", "{}"))
    USAGE: ClassVar = {
        "prompt_tokens": 3,
        "completion_tokens": 9,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 1},
    }

    def usage(self):
        return {**self.USAGE, "completion_tokens_details": {"reasoning_tokens": 2}}

    def whole(self, choices):
        calls = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": text}}
            for id, name, text in self.CALLS
        ]
        message = {
            "role": "assistant",
            "reasoning_content": "hm so",
            "content": "I call",
            "tool_calls": calls,
        }
        return {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}

    async def chunks(self):
        def chunk(finish=None, **delta):
            return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

        yield [chunk(role="assistant", content="")]
        yield [chunk(reasoning_content="hm"), chunk(reasoning_content=" so")]
        yield [chunk(content="I"), chunk(content=" call")]
        for index, (id, name, text) in enumerate(self.CALLS):
            yield [
                chunk(
                    tool_calls=[
                        {
                            "index": index,
                            "id": id,
                            "type": "function",
                            "function": {"name": name, "arguments": ""},
                        }
                    ]
                )
            ]
            for part in text:
                yield [chunk(tool_calls=[{"index": index, "function": {"arguments": part}}])]
        yield [chunk("tool_calls")]
        yield [{"choices": [], "usage": self.usage()}]


@pytest.fixture
def keeping(engine, client_of):
    """A client of a server that keeps responses."""
    return client_of(create_app(engine, ServerOptions(max_stored_responses=10)))


async def settled(client, name: str, left=("queued", "in_progress")) -> dict:
    while (reply := (await client.get(f"{PATH}/{name}")).json())["status"] in left:
        await asyncio.sleep(0.001)
    return reply


async def test_a_response_in_the_background(keeping):
    asked = {"input": "hi", "background": True, "max_output_tokens": 64}
    async with keeping as client:
        begun = (await client.post(PATH, json=asked)).json()
        assert (begun["status"], begun["background"], begun["store"], begun["output"]) == (
            "queued",
            True,
            True,
            [],
        )
        found = await settled(client, begun["id"])
        whole = (await client.post(PATH, json={**asked, "background": False})).json()
        assert (
            found["output"][0]["content"] == whole["output"][0]["content"]
            and found["usage"] == whole["usage"]
        )
        assert (found["status"], whole["background"]) == (whole["status"], False)
        assert (await client.post(f"{PATH}/{begun['id']}/cancel")).json() == found, (
            "what is made stays"
        )
        wrong = await client.post(PATH, json={**asked, "temperature": "hot"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperature"), (
            "before it is queued"
        )


async def test_events_of_a_kept_response(keeping):
    """They are those of the stream that made it, but for the deltas, and come after the work."""
    asked = {"input": "hi", "max_output_tokens": 2}
    async with keeping as client:
        made = events_of(await client.post(PATH, json={**asked, "stream": True}))
        name = made[-1]["response"]["id"]
        found = events_of(await client.get(f"{PATH}/{name}?stream=true"))
        assert found[-1]["response"] == made[-1]["response"]
        assert [event["type"] for event in found] == list(
            dict.fromkeys(event["type"] for event in made)
        )
        for event in found:
            assert event.keys() in [
                other.keys() for other in made if other["type"] == event["type"]
            ]
        assert found[2] == {**made[2], "sequence_number": 2}
        rest = await client.get(f"{PATH}/{name}?stream=true&starting_after=3")
        numbers = [event["sequence_number"] for event in map(_data, rest.text.split("\n\n")[:-1])]
        assert numbers == [*range(4, len(found))]
        late = (await client.post(PATH, json={**asked, "background": True})).json()["id"]
        assert events_of(await client.get(f"{PATH}/{late}?stream=true"))[-1]["type"] == (
            "response.incomplete" if made[-1]["type"].endswith("incomplete") else made[-1]["type"]
        )
        assert (await client.get(f"{PATH}/{name}?starting_after=3")).status_code == 400
        assert (await client.get(f"{PATH}/none?stream=true")).status_code == 404


def _data(frame: str) -> dict:
    return json.loads(frame.split("\n")[1].removeprefix("data: "))


def test_calls_and_reasoning_are_replayed():
    item = {"id": "fc_1", "type": "function_call", "status": "completed", "name": "f"}
    call = {**item, "call_id": "c", "arguments": "{}"}
    thought = {"type": "reasoning_text", "text": "hm"}
    reasoning = {"id": "rs_1", "type": "reasoning", "status": "completed", "content": [thought]}
    events = replayed({"id": "r", "status": "completed", "output": [reasoning, call]})
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert (events[3]["part"]["text"], events[8]["item"]["arguments"]) == ("", "")
    assert (events[9]["delta"], events[10]["name"], events[-1]["response"]["output"][1]) == (
        "{}",
        "f",
        call,
    )


async def test_input_items(keeping):
    """They are listed with ids, page by page, those of earlier turns and outputs among them."""
    async with keeping as client:
        first = (await client.post(PATH, json={"input": "hi", "max_output_tokens": 2})).json()
        listed = (await client.get(f"{PATH}/{first['id']}/input_items")).json()
        [item] = listed["data"]
        assert item == {
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_text", "text": "hi"}],
            "type": "message",
            "id": item["id"],
        }
        assert (listed["object"], listed["first_id"], listed["last_id"], listed["has_more"]) == (
            "list",
            item["id"],
            item["id"],
            False,
        )
        own = [
            {"role": "user", "content": "so", "id": "mine"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "b"},
        ]
        body = {"input": own, "previous_response_id": first["id"], "max_output_tokens": 2}
        path = f"{PATH}/{(await client.post(PATH, json=body)).json()['id']}/input_items"
        whole = (await client.get(path, params={"order": "asc"})).json()["data"]
        assert [entry["id"] for entry in whole[:3]] == [
            item["id"],
            first["output"][0]["id"],
            "mine",
        ]
        assert whole[3]["content"] == [{"type": "output_text", "text": "a", "annotations": []}]
        newest = (await client.get(path, params={"limit": 2})).json()
        assert newest["data"] == [*reversed(whole)][:2] and newest["has_more"]
        rest = (await client.get(path, params={"after": newest["last_id"]})).json()
        assert rest["data"] == [*reversed(whole)][2:] and not rest["has_more"]
        for params in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "none"}):
            reply = await client.get(path, params=params)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, *params)
        assert (await client.get(f"{PATH}/none/input_items")).status_code == 404


async def test_a_response_in_the_background_is_cancelled(keeping, engine):
    async with keeping as client:
        for end in ("cancel", "delete"):
            name = (await client.post(PATH, json={"input": "hang", "background": True})).json()[
                "id"
            ]
            await settled(client, name, ("queued",))
            while not engine.num_open:
                await asyncio.sleep(0.001)
            goes_on = (
                await client.post(PATH, json={"input": "so", "previous_response_id": name})
            ).json()["error"]
            assert (goes_on["param"], "in the background" in goes_on["message"]) == (
                "previous_response_id",
                True,
            )
            if end == "cancel":
                assert (await client.post(f"{PATH}/{name}/cancel")).json()["status"] == "cancelled"
                assert (await client.get(f"{PATH}/{name}")).json()["status"] == "cancelled"
            else:
                assert (await client.delete(f"{PATH}/{name}")).json()["deleted"]
            assert engine.num_open == 0, "the engine's work ends"
        assert (await client.get(f"{PATH}/{name}")).status_code == 404


async def test_a_response_in_the_background_that_fails(keeping, engine):
    async with keeping as client:
        engine.failure = RuntimeError("secret")
        name = (await client.post(PATH, json={"input": "hi", "background": True})).json()["id"]
        failed = await settled(client, name)
        assert failed["error"] == {
            "code": "server_error",
            "message": "The server failed on this request.",
        }


async def test_so_many_are_made_in_the_background():
    background = Background(most=1)
    held = asyncio.Event()
    background.start("one", held.wait)
    with pytest.raises(ApiError) as caught:
        background.start("two", held.wait)
    assert caught.value.status == 429 and caught.value.headers
    await background.stop("one")
    assert "one" not in background
    background.start("two", held.wait)
    await background.stop("two")


async def test_reasoning_and_calls_are_items():
    """The whole answer equals what the stream ends with, and the deltas of each item make it."""
    made, streamed = [Output(ResponsesBody(input="hi"), "fake", is_kept=False) for _ in range(2)]
    made.answer = Said()
    streamed.answer = Said()
    whole = made.whole([])
    assert [(item["type"], item["status"]) for item in whole["output"]] == [
        ("reasoning", "completed"),
        ("message", "completed"),
        ("function_call", "completed"),
        ("function_call", "completed"),
    ]
    assert [(item["call_id"], item["name"], item["arguments"]) for item in whole["output"][2:]] == [
        *Said.CALLS
    ]
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    events = [event async for events in streamed.events() for event in events]
    final = events[-1]["response"]

    def without_ids(response):
        return {**response, "id": "", "output": [{**item, "id": ""} for item in response["output"]]}

    assert without_ids(final) == without_ids(whole)
    kinds = {
        "reasoning": "reasoning_text",
        "message": "output_text",
        "function_call": "function_call_arguments",
    }
    for index, item in enumerate(final["output"]):
        own = [event for event in events if event.get("output_index") == index]
        kind = kinds[item["type"]]
        assert [own[0]["type"], own[-1]["type"]] == [
            "response.output_item.added",
            "response.output_item.done",
        ]
        assert own[0]["item"]["id"] == own[-1]["item"]["id"] == item["id"]
        deltas = "".join(
            event["delta"] for event in own if event["type"] == f"response.{kind}.delta"
        )
        [done] = [event for event in own if event["type"] == f"response.{kind}.done"]
        assert (
            deltas
            == done.get("text", done.get("arguments"))
            == item.get("arguments", (item.get("content") or [{}])[0].get("text"))
        )
    # Items go back as the input of the next turn.
    message = messages_of(final["output"])[0]
    assert (message["reasoning_content"], message["content"], len(message["tool_calls"])) == (
        "hm so",
        "I call",
        2,
    )
