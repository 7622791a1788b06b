"""Conversations that responses continue, over a fake engine: routes, owners, bounds."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from toolkit_lm_server.app import create_app
from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.responses.conversation_store import MOST_ITEMS, ConversationStore

pytestmark = pytest.mark.anyio
PATH = "/v1/conversations"
HI = {"role": "user", "content": "hi"}


@pytest.fixture
def keeping(engine, client_of):
    return client_of(create_app(engine, ServerOptions(max_stored_responses=10)))


def asked(engine) -> str:
    """The last prompt."""
    return engine.renderer.decode(engine.asked[-1][0]["prompt_token_ids"])


async def test_a_conversation_and_its_items(keeping):
    async with keeping as client:
        made = (await client.post(PATH, json={"items": [HI], "metadata": {"a": "b"}})).json()
        own = f"{PATH}/{made['id']}"
        assert (made["object"], made["metadata"]) == ("conversation", {"a": "b"})
        assert (await client.get(own)).json() == made
        changed = (await client.post(own, json={"metadata": {"c": "d"}})).json()
        assert changed == {**made, "metadata": {"c": "d"}}
        more = [{"role": "assistant", "content": "so"}, {**HI, "id": "msg_mine"}]
        added = (await client.post(f"{own}/items", json={"items": more})).json()
        assert [item["role"] for item in added["data"]] == ["assistant", "user"]
        assert (added["object"], added["last_id"], added["has_more"]) == ("list", "msg_mine", False)
        listed = (await client.get(f"{own}/items", params={"order": "asc", "limit": 2})).json()
        assert [item["content"][0] for item in listed["data"]] == [
            {"type": "input_text", "text": "hi"},
            {"type": "output_text", "text": "so", "annotations": []},
        ]
        assert listed["has_more"] is True
        after = {"order": "asc", "after": listed["last_id"]}
        rest = (await client.get(f"{own}/items", params=after)).json()
        assert [item["id"] for item in rest["data"]] == ["msg_mine"]
        assert (await client.get(f"{own}/items/msg_mine")).json() == rest["data"][0]
        again = await client.post(f"{own}/items", json={"items": [{**HI, "id": "msg_mine"}]})
        assert again.status_code == 400 and "already" in again.text
        assert (await client.delete(f"{own}/items/msg_mine")).json() == changed
        for method in ("GET", "DELETE"):
            gone = await client.request(method, f"{own}/items/msg_mine")
            assert (gone.status_code, gone.json()["error"]["code"]) == (404, "item_not_found")
        assert (await client.delete(own)).json() == {
            "id": made["id"],
            "object": "conversation.deleted",
            "deleted": True,
        }
        for method, path, body in (
            ("GET", own, None),
            ("POST", own, {"metadata": {}}),
            ("DELETE", own, None),
            ("GET", f"{own}/items", None),
            ("POST", f"{own}/items", {"items": [HI]}),
            ("GET", f"{own}/items/x", None),
            ("DELETE", f"{own}/items/x", None),
        ):
            gone = await client.request(method, path, json=body)
            error = gone.json()["error"]
            assert (gone.status_code, error["code"]) == (404, "conversation_not_found"), path


@pytest.mark.parametrize("shape", ["text", "object"])
@pytest.mark.parametrize("how", ["whole", "stream", "background"])
async def test_a_response_continues_it(engine, keeping, shape, how):
    async with keeping as client:
        made = (await client.post(PATH, json={"items": [HI]})).json()
        reference = made["id"] if shape == "text" else {"id": made["id"]}

        async def ask(text: str, **body) -> dict:
            sent = {"input": text, "conversation": reference, "max_output_tokens": 1, **body}
            sent |= {"stream": how == "stream", "background": how == "background"}
            reply = await client.post("/v1/responses", json=sent)
            if how == "stream":
                return json.loads(reply.text.rstrip().split("data: ")[-1])["response"]
            found = reply.json()
            path = f"/v1/responses/{found['id']}?stream=true"
            return found if how == "whole" else await client.get(path) and found

        first = await ask("so", instructions="short")
        assert first["conversation"] == {"id": made["id"]}
        assert asked(engine) == "system:short;user:hi;user:so;"
        second = await ask("then", store=None if how == "background" else False)
        assert asked(engine) == "user:hi;user:so;assistant:S;user:then;"
        items = (await client.get(f"{PATH}/{made['id']}/items?order=asc")).json()["data"]
        assert [item["content"][0]["text"] for item in items] == ["hi", "so", "S", "then", "U"]
        if how != "background":
            assert (await client.get(f"/v1/responses/{second['id']}")).status_code == 404
        path = f"/v1/responses/{first['id']}/input_items?order=asc"
        made_of = (await client.get(path)).json()["data"]
        assert made_of == items[:2]


async def test_what_is_refused(engine, keeping, client, client_of):
    async with keeping as own:
        made = (await own.post(PATH, json={})).json()
        for body, status, param in (
            ({"conversation": "conv_x"}, 404, "conversation"),
            ({"conversation": {"id": made["id"], "more": 1}}, 400, "conversation"),
            ({"conversation": made["id"], "previous_response_id": "x"}, 400, "conversation"),
        ):
            reply = await own.post("/v1/responses", json={"input": "hi", **body})
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (status, param), error
        for body in (
            {"items": [HI] * 21},
            {"items": [{"type": "web_search_call"}]},
            {"items": [{"role": "user", "content": 5}]},
            {"metadata": {"x" * 65: "a"}},
            {"metadata": {"a": 5}},
        ):
            reply = await own.post(PATH, json=body)
            assert reply.status_code == 400
            assert next(iter(body)) in reply.json()["error"]["message"]
        assert (await own.post(f"{PATH}/{made['id']}/items", json={"items": []})).status_code == 400
    refused = await client.post("/v1/responses", json={"input": "hi", "conversation": "conv_x"})
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == ("conversation", "unsupported_parameter")
    missing = await client.post(PATH, json={})
    assert missing.status_code == 404 and "max_stored_responses" in missing.text


@pytest.mark.parametrize("how", ["whole", "stream", "background"])
async def test_two_responses_at_once_cannot_both_add_an_item_of_one_id(keeping, how):
    async with keeping as client:
        made = (await client.post(PATH, json={"items": [HI]})).json()

        async def ask(text: str) -> dict:
            item = {"role": "user", "content": text, "id": "msg_mine"}
            sent = {"input": [item], "conversation": made["id"], "max_output_tokens": 1}
            sent |= {"stream": how == "stream", "background": how == "background"}
            reply = await client.post("/v1/responses", json=sent)
            if how == "stream":
                return json.loads(reply.text.rstrip().split("data: ")[-1])["response"]
            found = reply.json()
            if how == "background":
                path = f"/v1/responses/{found['id']}"
                await client.get(f"{path}?stream=true")
                return (await client.get(path)).json()
            return found

        both = await asyncio.gather(ask("so"), ask("then"))
        [failed] = [one for one in both if one["error"]]
        [ended] = [one for one in both if not one["error"]]
        assert "msg_mine" in failed["error"]["message"]
        items = (await client.get(f"{PATH}/{made['id']}/items?order=asc")).json()["data"]
        assert [item["role"] for item in items] == ["user", "user", "assistant"]
        assert items[2]["id"] == ended["output"][0]["id"]
        failures = await client.get(f"/v1/responses/{failed.get('id', 'none')}")
        assert (failures.status_code == 200) == (how == "background")


def test_responses_of_many_threads_are_added_whole():
    store = ConversationStore(1)
    made = store.create([], {}, "bob")

    def extend(number: int) -> None:
        store.extend(made.id, "bob", [item(f"in{number}")], [item(f"out{number}")])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(extend, range(200)))
    names = [*store.get(made.id, "bob").items]
    assert len(names) == 400
    assert all(
        (first.replace("in", "out") == second) and first.startswith("in")
        for first, second in zip(names[::2], names[1::2], strict=True)
    )


def test_a_response_takes_no_room_that_another_has_taken():
    store = ConversationStore(1)
    made = store.create([item(f"{number}") for number in range(MOST_ITEMS - 1)], {}, "bob")
    found = store.get(made.id, "bob")
    for name in ("mine", "yours"):
        found.check_room([item(name)], "input")
    store.extend(made.id, "bob", [item("mine")], [item("answer")])
    with pytest.raises(ApiError, match="at most"):
        store.extend(made.id, "bob", [item("yours")], [item("other")])
    full = store.get(made.id, "bob")
    assert len(full.items) == MOST_ITEMS + 1 and "other" not in full.items


async def test_a_failed_response_adds_nothing(engine, keeping):
    async with keeping as client:
        made = (await client.post(PATH, json={"items": [HI]})).json()
        refused = {"input": "refuse", "conversation": made["id"]}
        assert (await client.post("/v1/responses", json=refused)).status_code == 400
        items = (await client.get(f"{PATH}/{made['id']}/items")).json()["data"]
        assert len(items) == 1


async def test_each_client_has_its_own(engine, client_of):
    options = ServerOptions(max_stored_responses=10, api_key=["a", "b"])
    async with client_of(create_app(engine, options)) as client:
        alice, bob = ({"authorization": f"Bearer {key}"} for key in "ab")
        made = (await client.post(PATH, json={"items": [HI]}, headers=alice)).json()
        own = f"{PATH}/{made['id']}"
        assert (await client.get(own, headers=alice)).status_code == 200
        for method, path in (("GET", own), ("DELETE", own), ("GET", f"{own}/items")):
            assert (await client.request(method, path, headers=bob)).status_code == 404
        body = {"input": "hi", "conversation": made["id"], "max_output_tokens": 1}
        assert (await client.post("/v1/responses", json=body, headers=bob)).status_code == 404
        assert (await client.post("/v1/responses", json=body, headers=alice)).status_code == 200


def item(name: str, size: int = 10) -> dict:
    return {"type": "message", "id": name, "role": "user", "content": "x" * size}


def test_what_is_kept_is_bounded():
    store = ConversationStore(2)
    mine = store.create([], {}, "bob")
    for _ in range(5):
        last = store.create([], {}, "alice")
    assert store.get(mine.id, "bob") and store.get(last.id, "alice")
    big = ConversationStore(10, most_bytes=20_000)
    kept = big.create([], {}, "bob")
    grown = big.create([], {}, "alice")
    with pytest.raises(ApiError, match="not found"):
        for number in range(100):
            big.add_items(grown.id, "alice", [item(f"{number}", 1000)])
    assert big.get(kept.id, "bob")


def test_sizes_are_those_of_what_is_kept():
    store = ConversationStore(10)
    made = store.create([item("a"), item("b")], {"x": "y"}, "alice")
    store.add_items(made.id, "alice", [item("c", 500)])
    store.set_metadata(made.id, {"x": "y" * 100}, "alice")
    for name in "abc":
        store.remove_item(made.id, name, "alice")
    store.set_metadata(made.id, {"x": "y"}, "alice")
    empty = store.create([], {"x": "y"}, "alice")
    assert store.get(made.id, "alice").size == empty.size


def test_a_conversation_has_so_many_items():
    store = ConversationStore(10)
    made = store.create([], {}, "alice")
    items = [item(f"{number}") for number in range(MOST_ITEMS)]
    store.add_items(made.id, "alice", items)
    with pytest.raises(ApiError, match="at most 10,000 items"):
        store.add_items(made.id, "alice", [item("more")])
