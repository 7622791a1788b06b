"""`/v1/responses` with tools of MCP servers: items, events, approval, bounds. A script has the
model's answers, but for the last test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from mcp_stub import Stub, serving
from openai import AsyncOpenAI
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm_server.app import create_app
from toolkit_lm_server.chat import Chat
from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.options import ServerOptions

pytestmark = pytest.mark.anyio
PATH = "/v1/responses"
MODEL = {"model": "tiny", "device": "cpu", "dtype": "float32", "engine_process": False}
MODEL |= {"max_num_seqs": 4}


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module")
def server() -> Iterator[Stub]:
    with serving() as found:
        yield found


@pytest.fixture
def stub(server) -> Stub:
    server.asked.clear()
    server.ended = 0
    server.status = 200
    return server


@pytest.fixture(scope="module")
def engine(server) -> Iterator[AsyncLLM]:
    host = server.url.removeprefix("http://").removesuffix("/mcp")
    own = {"private_hosts": [host], "max_calls": 3}
    llm = AsyncLLM(VllmConfig.make(**MODEL, plugin_option={"mcp": own}))
    yield llm
    llm.close()


@pytest.fixture
async def client(engine):
    app = create_app(engine, ServerOptions(max_stored_responses=8, tool_call_parser="hermes"))
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as found,
    ):
        yield found


def tool(stub: Stub, **more: Any) -> dict[str, Any]:
    own = {"type": "mcp", "server_label": "wall", "server_url": f"{stub.url}?key=hidden"}
    return {**own, "authorization": "hidden", "require_approval": "never", **more}


class Answer:
    """An answer of the model: a text, and calls of (name, arguments)."""

    def __init__(self, text: str, calls: list[tuple[str, str]], finish: str | None = None) -> None:
        self._text = text
        self._calls = calls
        self._finish = finish or ("tool_calls" if calls else "stop")

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        }

    async def chunks(self):
        def chunk(finish=None, **delta):
            return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

        if self._text == "raise":
            yield [chunk(content="so far")]
            raise ApiError(500, "the model failed on this request", code="model_error")
        if self._text:
            yield [chunk(content=self._text)]
        for index, (name, arguments) in enumerate(self._calls):
            function = {"name": name, "arguments": arguments}
            call = {"index": index, "id": f"call_{index}", "type": "function", "function": function}
            yield [chunk(tool_calls=[call])]
        yield [chunk(self._finish)]

    async def aclose(self) -> None:
        pass


@pytest.fixture
def script(monkeypatch):
    """script(answer, ...) has the model's answers. It returns the fields of the chats asked for."""

    def say(*answers: Answer) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []
        left = [*answers]

        async def ask(self, fields, context, names=None):
            asked.append(dict(fields))
            return left.pop(0)

        monkeypatch.setattr(Chat, "ask", ask)
        return asked

    return say


async def posted(client, **body) -> dict[str, Any]:
    response = await client.post(PATH, json={"input": "go", **body})
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(client, **body) -> list[dict[str, Any]]:
    response = await client.post(PATH, json={"input": "go", "stream": True, **body})
    frames = response.text.rstrip("\n").split("\n\n")
    found = [json.loads(frame.split("data: ")[1]) for frame in frames]
    assert [event["sequence_number"] for event in found] == [*range(len(found))]
    return found


def kinds(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


async def test_calls_are_made(client, stub, script):
    red = ("paint", '{"colour": "red"}')
    asked = script(Answer("I paint", [red, ("look_up", "{}")]), Answer("Done.", []))
    reply = await posted(client, tools=[tool(stub), {"type": "function", "name": "own"}])
    assert kinds(reply) == ["mcp_list_tools", "message", "mcp_call", "mcp_call", "message"]
    listed, _, call, other, last = reply["output"]
    assert [one["name"] for one in listed["tools"]] == ["paint", "look.up", "fail"]
    told = {"server_label": "wall", "status": "completed", "error": None}
    assert {name: call[name] for name in told} == told
    assert (call["name"], call["arguments"], call["output"]) == (*red, "It is red.")
    assert (other["name"], last["content"][0]["text"]) == ("look.up", "Done.")
    assert (reply["status"], reply["usage"]["total_tokens"]) == ("completed", 10)
    assert reply["usage"]["input_tokens_details"]["cached_tokens"] == 2
    names = [one["function"]["name"] for one in asked[0]["tools"]]
    assert names == ["own", "paint", "look_up", "fail"]
    messages = asked[1]["messages"]
    assert [one["role"] for one in messages] == ["user", "assistant", "tool", "assistant", "tool"]
    assert messages[1]["content"] == "I paint"
    assert messages[1]["tool_calls"][0]["function"] == {"name": red[0], "arguments": red[1]}
    assert messages[2] == {"role": "tool", "tool_call_id": call["id"], "content": "It is red."}
    assert messages[3]["tool_calls"][0]["function"]["name"] == "look_up"
    assert "hidden" not in json.dumps(reply), "secrets are for the server alone"
    kept = (await client.get(f"{PATH}/{reply['id']}")).json()
    assert kept == reply
    assert stub.ended == 1, "the session is over"


async def test_events(client, stub, script):
    script(Answer("I paint", [("paint", '{"colour": "red"}')]), Answer("Done.", []))
    found = await streamed(client, tools=[tool(stub)])
    assert [event["type"].removeprefix("response.") for event in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "mcp_list_tools.in_progress",
        "mcp_list_tools.completed",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "mcp_call.in_progress",
        "mcp_call_arguments.delta",
        "mcp_call_arguments.done",
        "mcp_call.completed",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    places = [event["output_index"] for event in found if "output_index" in event]
    assert places == [0] * 4 + [1] * 6 + [2] * 6 + [3] * 6
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == found[-1]["response"]["output"]
    for event in found[12:18]:
        name = event.get("item_id") or event["item"]["id"]
        assert name == done[2]["id"]
    again = await client.get(f"{PATH}/{found[-1]['response']['id']}?stream=true")
    replayed = [json.loads(one.split("data: ")[1]) for one in again.text.rstrip().split("\n\n")]
    assert [one["type"] for one in replayed] == [one["type"] for one in found]


async def test_approval(client, stub, script):
    red = ("paint", '{"colour": "red"}')
    script(Answer("", [red]))
    own = {"tools": [tool(stub, require_approval="always")]}
    found = await streamed(client, **own)
    first = found[-1]["response"]
    assert kinds(first) == ["mcp_list_tools", "mcp_approval_request"]
    request = first["output"][1]
    assert (request["name"], request["arguments"]) == red
    assert [event["type"] for event in found[-3:]] == [
        "response.output_item.added",
        "response.output_item.done",
        "response.completed",
    ]
    assert "tools/call" not in [method for method, _, _ in stub.asked]
    decision = {"type": "mcp_approval_response", "approval_request_id": request["id"]}
    asked = script(Answer("Done.", []))
    yes = {"previous_response_id": first["id"], "input": [{**decision, "approve": True}]}
    second = await posted(client, **yes, **own)
    assert kinds(second) == ["mcp_call", "message"], "tools were listed before"
    call = second["output"][0]
    assert (call["approval_request_id"], call["output"]) == (request["id"], "It is red.")
    assert asked[0]["messages"][-1]["content"] == "It is red."
    asked = script(Answer("Pity.", []))
    no = {"previous_response_id": first["id"], "input": [{**decision, "approve": False}]}
    third = await posted(client, **no, **own)
    assert kinds(third) == ["message"]
    assert "declined" in asked[0]["messages"][-1]["content"]
    assert len([method for method, _, _ in stub.asked if method == "tools/call"]) == 1
    # A client that keeps the conversation itself sends all of it: what was called is not again.
    asked = script(Answer("So.", []))
    whole = [{"role": "user", "content": "go"}, *first["output"], {**decision, "approve": True}]
    fourth = await posted(client, input=[*whole, *second["output"]], **own)
    assert kinds(fourth) == ["message"]
    assert [one["role"] for one in asked[0]["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    for body, message in (
        ({**yes, "tools": []}, "no tool of type 'mcp'"),
        ({**yes, "tools": [tool(stub, server_label="other")]}, "no server with the server_label"),
        ({"input": [{**decision, "approve": True}], **own}, "no mcp_approval_request"),
        ({"input": [{**decision, "approve": 5}], **own}, "approve must be"),
    ):
        refused = await client.post(PATH, json={"input": "go", **body})
        assert refused.status_code == 400 and message in refused.json()["error"]["message"]


async def test_a_call_of_the_clients_own_ends_the_response(client, stub, script):
    script(Answer("", [("paint", '{"colour": "red"}'), ("own", "{}")]))
    reply = await posted(client, tools=[tool(stub), {"type": "function", "name": "own"}])
    assert kinds(reply) == ["mcp_list_tools", "mcp_call", "function_call"]
    assert reply["output"][1]["output"] == "It is red."


@pytest.mark.parametrize("stated", [None, 1, 0])
async def test_so_many_calls(client, stub, script, stated):
    red = ("paint", '{"colour": "red"}')
    asked = script(Answer("", [red] * 2), Answer("", [red] * 2), Answer("Done.", []))
    reply = await posted(client, tools=[tool(stub)], max_tool_calls=stated)
    made = [item for item in reply["output"] if item["type"] == "mcp_call"]
    most = 3 if stated is None else stated
    assert [item["status"] for item in made].count("completed") == most
    assert len([method for method, _, _ in stub.asked if method == "tools/call"]) == most
    assert all("limit of calls" in item["error"]["message"] for item in made[most:])
    wanted = {None: ["auto", "auto", "none"], 1: ["auto", "none", "none"], 0: ["none"] * 3}[stated]
    assert [one["tool_choice"] for one in asked] == wanted


async def test_a_tool_that_must_be_called_is_called_once(client, stub, script):
    for choice, first in (
        ("required", "required"),
        ({"type": "mcp", "server_label": "wall", "name": "paint"}, {"name": "paint"}),
    ):
        asked = script(Answer("", [("paint", '{"colour": "red"}')]), Answer("Done.", []))
        await posted(client, tools=[tool(stub)], tool_choice=choice)
        sent = asked[0]["tool_choice"]
        assert sent == first if isinstance(first, str) else sent["name"] == first["name"]
        assert asked[1]["tool_choice"] == "auto"


async def test_an_answer_that_is_cut_calls_nothing(client, stub, script):
    script(Answer("", [("paint", "{")], finish="length"))
    reply = await posted(client, tools=[tool(stub)])
    assert (reply["status"], reply["output"][-1]["status"]) == ("incomplete", "incomplete")
    assert "tools/call" not in [method for method, _, _ in stub.asked]


async def test_failures(client, stub, script):
    script(Answer("", [("fail", "{}")]), Answer("Pity.", []))
    reply = await posted(client, tools=[tool(stub)])
    call = reply["output"][1]
    assert (call["status"], call["output"]) == ("failed", None)
    assert call["error"]["content"] == [{"type": "text", "text": "no paint"}]
    script(Answer("", [("paint", '{"colour": "red"}')]), Answer("raise", []))
    found = await streamed(client, tools=[tool(stub)])
    last = found[-1]
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "server_error")
    assert kinds(last["response"]) == ["mcp_list_tools", "mcp_call"]
    script(Answer("", [("paint", '{"colour": "red"}')]), Answer("raise", []))
    whole = await client.post(PATH, json={"input": "go", "tools": [tool(stub)]})
    assert (whole.status_code, whole.json()["error"]["message"]) == (
        500,
        "the model failed on this request",
    )
    stub.status = 503
    refused = await client.post(PATH, json={"input": "go", "tools": [tool(stub)]})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (424, "external_connector_error")
    assert "'wall'" in error["message"] and "hidden" not in refused.text
    foreign = tool(stub, server_url="http://169.254.169.254/latest")
    refused = await client.post(PATH, json={"input": "go", "tools": [foreign]})
    assert refused.status_code == 400 and "not allowed" in refused.text


async def test_in_the_background_and_in_a_conversation(client, stub, script):
    script(Answer("", [("paint", '{"colour": "red"}')]), Answer("Done.", []))
    made = (await client.post("/v1/conversations", json={})).json()
    own = {"tools": [tool(stub)], "conversation": made["id"]}
    queued = await posted(client, background=True, **own)
    assert "hidden" not in json.dumps(queued)
    while (reply := (await client.get(f"{PATH}/{queued['id']}")).json())["status"] != "completed":
        assert reply["status"] in ("queued", "in_progress"), reply
        await asyncio.sleep(0.001)
    assert kinds(reply) == ["mcp_list_tools", "mcp_call", "message"]
    asked = script(Answer("So.", []))
    second = await posted(client, **own)
    assert kinds(second) == ["message"]
    assert [one["role"] for one in asked[0]["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]


async def test_without_a_host_such_tools_are_left_out(stub):
    with_none = AsyncLLM(VllmConfig.make(**MODEL))
    transport = httpx.ASGITransport(create_app(with_none, ServerOptions()))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        body = {"input": "go", "tools": [tool(stub)], "max_output_tokens": 1}
        reply = await client.post(PATH, json=body)
    with_none.close()
    assert reply.headers["x-ignored-fields"] == "tools.mcp"
    assert stub.asked == [] and "hidden" not in reply.text


async def test_a_model_calls_by_itself(client, stub):
    """By the openai client, whose types are those of the items and events."""
    asked = {
        "model": "tiny",
        "input": "Paint the wall.",
        "tools": [tool(stub, allowed_tools=["paint"])],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_output_tokens": 64,
    }
    async with AsyncOpenAI(base_url="http://localhost/v1", api_key="x", http_client=client) as own:
        whole = await own.responses.create(**asked)
        events = [event async for event in await own.responses.create(**asked, stream=True)]
    call = next(item for item in whole.output if item.type == "mcp_call")
    assert (call.name, call.status) == ("paint", "completed")
    colour = json.loads(call.arguments)["colour"]
    assert call.output == f"It is {colour}."
    last = events[-1].response
    assert [item.type for item in last.output] == [item.type for item in whole.output]
    assert "response.mcp_call.completed" in [event.type for event in events]
