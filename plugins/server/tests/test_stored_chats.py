"""Chats with `store`, over a fake engine: what is kept, for whom, and what comes back."""

from __future__ import annotations

import json

import pytest
from toolkit_lm_server.app import create_app
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.stored_chats import ChatStore, StoringChatBody, Streamed

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture
def keeping(engine, client_of):
    return client_of(create_app(engine, ServerOptions(max_stored_responses=10)))


async def test_an_answer_is_kept_and_found_again(keeping):
    async with keeping as client:
        asked = {**HI, "store": True, "metadata": {"a": "b"}, "n": 2}
        made = (await client.post(PATH, json=asked)).json()
        assert "x-ignored-fields" not in made
        own = f"{PATH}/{made['id']}"
        assert (await client.get(own)).json() == {**made, "metadata": {"a": "b"}}
        changed = (await client.post(own, json={"metadata": {"c": "d"}})).json()
        assert changed == {**made, "metadata": {"c": "d"}}
        messages = (await client.get(f"{own}/messages")).json()
        assert messages["data"] == [
            {"role": "user", "content": "hi", "id": f"{made['id']}-0", "content_parts": None}
        ]
        assert (await client.delete(own)).json() == {
            "id": made["id"],
            "object": "chat.completion.deleted",
            "deleted": True,
        }
        for method, path, body in (
            ("GET", own, None),
            ("POST", own, {"metadata": {}}),
            ("DELETE", own, None),
            ("GET", f"{own}/messages", None),
        ):
            gone = await client.request(method, path, json=body)
            error = gone.json()["error"]
            assert (gone.status_code, error["code"]) == (404, "chat_completion_not_found")


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 1}, {"n": 2}])
async def test_a_stream_is_kept_as_a_whole_answer_is(keeping, more):
    async with keeping as client:
        asked = {**HI, **more, "store": True}
        whole = (await client.post(PATH, json=asked)).json()
        reply = await client.post(PATH, json={**asked, "stream": True})
        name = json.loads(reply.text.split("\n\n")[0].removeprefix("data: "))["id"]
        kept = (await client.get(f"{PATH}/{name}")).json()
    for answer in (whole, kept):
        del answer["id"], answer["created"]
    assert {**kept["choices"][0]["message"], "content": ""}.keys() >= {"role", "content"}
    for mine, theirs in zip(kept["choices"], whole["choices"], strict=True):
        assert mine["message"]["content"] == theirs["message"]["content"]
        assert mine["finish_reason"] == theirs["finish_reason"]
        assert mine["logprobs"] == theirs["logprobs"]
    assert kept["usage"] == whole["usage"] and kept["object"] == "chat.completion"


async def test_lists(keeping):
    async with keeping as client:
        names = []
        for number in range(3):
            asked = {**HI, "store": True, "metadata": {"number": f"{number}", "all": "x"}}
            names.append((await client.post(PATH, json=asked)).json()["id"])
        for body in (HI, {**HI, "store": False}):
            await client.post(PATH, json=body)

        async def found(**params) -> list[str]:
            reply = await client.get(PATH, params=params)
            return [chat["id"] for chat in reply.json()["data"]]

        assert await found() == await found(model="fake") == names
        assert await found(order="desc", limit=2) == names[:0:-1]
        assert await found(after=names[0]) == names[1:]
        assert await found(model="other") == []
        assert await found(**{"metadata[number]": "1"}) == [names[1]]
        assert await found(**{"metadata[number]": "1", "metadata[all]": "y"}) == []


async def test_each_client_has_its_own(engine, client_of):
    options = ServerOptions(max_stored_responses=10, api_key=["a", "b"])
    async with client_of(create_app(engine, options)) as client:
        alice, bob = ({"authorization": f"Bearer {key}"} for key in "ab")
        made = (await client.post(PATH, json={**HI, "store": True}, headers=alice)).json()
        own = f"{PATH}/{made['id']}"
        for method, path in (("GET", own), ("DELETE", own), ("GET", f"{own}/messages")):
            assert (await client.request(method, path, headers=bob)).status_code == 404
        assert (await client.get(PATH, headers=bob)).json()["data"] == []
        assert (await client.get(own, headers=alice)).status_code == 200


async def test_a_server_that_keeps_none_says_so(client):
    reply = await client.post(PATH, json={**HI, "store": True, "metadata": {"a": "b"}})
    assert (reply.status_code, reply.headers["x-ignored-fields"]) == (200, "store")
    assert (await client.get(PATH)).status_code in (404, 405)


async def test_what_is_refused(keeping):
    async with keeping as client:
        for metadata in ({"x" * 65: "a"}, {"a": 5}, {f"{n}": "a" for n in range(17)}):
            reply = await client.post(PATH, json={**HI, "store": True, "metadata": metadata})
            assert reply.status_code == 400 and "metadata" in reply.json()["error"]["message"]
        batch = {"messages": [HI["messages"]], "max_tokens": 4, "store": True}
        reply = await client.post(f"{PATH}/batch", json=batch)
        assert reply.headers["x-ignored-fields"] == "store"


def test_what_is_kept_is_bounded():
    store = ChatStore(2)
    body = StoringChatBody(messages=[{"role": "user", "content": "hi"}])
    for owner, name in (("bob", "x"), *(("alice", f"{number}") for number in range(9))):
        store.add({"id": name}, body, owner)
    assert [chat["id"] for chat in store.of("alice")] == ["8"]
    assert [chat["id"] for chat in store.of("bob")] == ["x"]


def test_calls_of_a_stream_are_joined():
    def chunk(finish=None, **delta):
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return {"id": "a", "object": "chat.completion.chunk", "choices": [choice]}

    def call(index, **function):
        first = {"id": f"call_{index}", "type": "function"} if "name" in function else {}
        return chunk(tool_calls=[{"index": index, **first, "function": function}])

    streamed = Streamed()
    streamed.read([chunk(role="assistant", content=""), chunk(reasoning_content="hm")])
    streamed.read([call(0, name="f", arguments=""), call(0, arguments='{"x"')])
    streamed.read([call(0, arguments=": 1}"), call(1, name="g", arguments="{}")])
    streamed.read([chunk("tool_calls")])
    made = streamed.completion({"total_tokens": 5})
    [choice] = made["choices"]
    assert (choice["finish_reason"], made["usage"]) == ("tool_calls", {"total_tokens": 5})
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": "f", "arguments": '{"x": 1}'},
            },
            {"id": "call_1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
