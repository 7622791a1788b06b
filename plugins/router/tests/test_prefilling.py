"""Prompts that a backend of its own computes, in front of stubs."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

import pytest
from toolkit_lm.errors import ConfigError
from toolkit_lm_router.options import RouterOptions

pytestmark = pytest.mark.anyio
PARAMS = {"do_remote_prefill": True, "remote_block_ids": [[1, 2**48 - 1]], "remote_host": "a"}
PARAM_BYTES = b'"kv_transfer_params"'
LONG = "a word " * 100


def bodies(stub) -> list[dict]:
    return [json.loads(body) for _, _, body in stub.asked]


@pytest.fixture
async def routed(make_routing, make_stub):
    """A function: a router in front of a prefill stub and of one that answers. `owners`: whose
    servers they are. Blocks can be fetched early if both are ours."""
    async with AsyncExitStack() as ending:

        async def start(owners=("toolkit-lm", "others"), **options):
            prefill, serving = (make_stub(owner=owner) for owner in owners)
            await prefill.start()
            ending.push_async_callback(prefill.stop)
            prefill.json = {"kv_transfer_params": PARAMS}
            given = {"prefill_min_bytes": 200, "prefill_backend": [prefill.url], **options}
            made = await ending.enter_async_context(make_routing(serving, **given))
            await made.until("ready", prefill)
            return made, prefill, serving

        yield start


async def test_a_long_prompt_is_computed_first(routed):
    router, prefill, serving = await routed()
    status, _ = await router.post(prompt=LONG, max_tokens=9, n=2, seed=3)
    assert status == 200
    [first] = bodies(prefill)
    [second] = bodies(serving)
    assert (first["max_tokens"], first["n"], first["stream"]) == (1, 1, False)
    assert first["prompt"] == second["prompt"] == LONG
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert second["kv_transfer_params"] == PARAMS
    assert (second["max_tokens"], second["n"]) == (9, 2)
    assert "stream" not in second


async def test_a_chat_is_computed_first(routed):
    router, prefill, serving = await routed()
    messages = [{"role": "user", "content": LONG}]
    await router.post("/v1/chat/completions", messages=messages, max_completion_tokens=9)
    [first] = bodies(prefill)
    [second] = bodies(serving)
    assert first["max_completion_tokens"] == 1 and first["messages"] == messages
    assert second["max_completion_tokens"] == 9 and second["kv_transfer_params"] == PARAMS


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "short"}),
        ("/v1/embeddings", {"input": LONG}),
        ("/v1/completions", {"prompt": LONG, "kv_transfer_params": {"do_remote_decode": True}}),
    ],
)
async def test_others_go_straight(routed, path, body):
    router, prefill, serving = await routed()
    await router.post(path, **body)
    assert not prefill.asked
    assert bodies(serving) == [body]


@pytest.mark.parametrize("failure", ["gone", "500", "503", "400", "no params", "no JSON"])
async def test_a_prefill_that_fails_costs_nothing(routed, failure):
    router, prefill, serving = await routed(health_interval=30.0)
    if failure == "gone":
        await prefill.stop()
    elif failure.isdecimal():
        prefill.status = int(failure)
    else:
        prefill.json = {} if failure == "no params" else [1]
    status, _ = await router.post(prompt=LONG, max_tokens=9)
    assert status == 200
    assert bodies(serving) == [{"prompt": LONG, "max_tokens": 9}]
    backend = router.fleet.backends[prefill.url]
    assert backend.load == 0
    assert backend.num_retries == (failure in ("gone", "500", "503"))
    if failure == "gone":
        assert backend.state == "down"


OURS = ("toolkit-lm", "toolkit-lm")


async def test_blocks_are_fetched_while_they_are_computed(routed):
    """The backend that answers has the request before the prompt is computed, if both know how."""
    router, prefill, serving = await routed(OURS)
    prefill.gate.clear()
    status, _ = await router.post(prompt=LONG, max_tokens=9)
    assert status == 200
    [first] = bodies(prefill)
    [second] = bodies(serving)
    name = first["kv_transfer_params"].pop("transfer_id")
    assert first["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert second["kv_transfer_params"] == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": name,
    }
    # The answer is there: nobody needs the prompt any more.
    while not prefill.num_left or router.fleet.backends[prefill.url].load:
        await asyncio.sleep(0.001)


async def test_a_transfer_has_a_name_of_its_own(routed):
    router, prefill, _ = await routed(OURS)
    for _ in range(2):
        await router.post(prompt=LONG)
    first, second = (body["kv_transfer_params"]["transfer_id"] for body in bodies(prefill))
    assert first != second


@pytest.mark.parametrize("owners", [("toolkit-lm", "others"), ("others", "toolkit-lm")])
async def test_servers_of_others_fetch_afterwards(routed, owners):
    router, _, serving = await routed(owners)
    await router.post(prompt=LONG)
    [second] = bodies(serving)
    assert second["kv_transfer_params"] == PARAMS


@pytest.mark.parametrize("failure", ["gone", "500", "503", "400", "no params", "no JSON"])
async def test_nobody_waits_for_a_prefill_that_fails(routed, failure):
    """A backend that waits for blocks gets the request anew, without them."""
    router, prefill, serving = await routed(OURS, health_interval=30.0)
    serving.gate.clear()
    if failure == "gone":
        await prefill.stop()
    elif failure.isdecimal():
        prefill.status = int(failure)
    else:
        prefill.json = {} if failure == "no params" else [1]
    answer = asyncio.create_task(router.post(prompt=LONG, max_tokens=9))
    while not serving.asked or PARAM_BYTES in serving.asked[-1][2]:
        await asyncio.sleep(0.001)
    serving.gate.set()
    status, _ = await answer
    assert status == 200
    *early, last = bodies(serving)
    assert last == {"prompt": LONG, "max_tokens": 9}
    assert all("transfer_id" in body["kv_transfer_params"] for body in early)
    while serving.num_left < len(early):
        await asyncio.sleep(0.001)
    assert router.fleet.backends[prefill.url].load == 0
    assert router.fleet.backends[serving.url].load == 0


async def test_a_client_that_leaves_ends_both(routed):
    router, prefill, serving = await routed(OURS)
    prefill.gate.clear()
    serving.gate.clear()
    asking = asyncio.create_task(router.post(prompt=LONG))
    while not (prefill.asked and serving.asked):
        await asyncio.sleep(0.001)
    asking.cancel()
    while not (prefill.num_left and serving.num_left):
        await asyncio.sleep(0.001)
    while any(backend.load for backend in router.fleet.backends.values()):
        await asyncio.sleep(0.001)


async def test_blocks_are_fetched_once(routed, make_stub):
    """A backend that a request is sent to after a failure computes the prompt."""
    router, prefill, serving = await routed()
    other = make_stub(owner="others")
    await other.start()
    serving.status = other.status = 503
    serving.headers = other.headers = {"Retry-After": "0"}
    added = router.fleet.add(other.url)
    router.fleet.set_state(added, "ready")
    router.fleet.set_models(added, [{"id": "m"}], 1)
    await router.post(prompt=LONG)
    found = [body.get("kv_transfer_params") for stub in (serving, other) for body in bodies(stub)]
    assert len(found) == 2 and found.count(PARAMS) == 1
    assert len(prefill.asked) == 1
    await other.stop()


async def test_it_answers_nothing(routed):
    """A prefill backend gets no other requests, even where no other one is ready."""
    router, prefill, serving = await routed(queue_timeout=0.3)
    serving.health = 503
    await router.until("down", serving)
    status, _ = await router.post(prompt="short")
    assert status == 503 and not prefill.asked
    assert (await router.get("/health"))[0] == 503


async def test_operators_see_and_add_roles(routed):
    router, prefill, serving = await routed(admin_key="k")
    headers = {"Authorization": "Bearer k"}
    status, listed = await router.get("/router/backends", headers)
    roles = {each["url"]: each["role"] for each in json.loads(listed)["backends"]}
    assert status == 200 and roles == {prefill.url: "prefill", serving.url: "serve"}
    for url, role, expected in (
        ("http://127.0.0.1:9", "prefill", 200),
        ("http://127.0.0.1:9", "serve", 400),
        (serving.url, "serve", 200),
        ("http://127.0.0.1:8", "decode", 400),
    ):
        status, _ = await router.post("/router/backends/add", headers, url=url, role=role)
        assert status == expected, (url, role)


def test_a_server_has_one_role():
    with pytest.raises(ConfigError, match="is a backend, too"):
        RouterOptions(backend=["http://a"], prefill_backend=["http://a"])
    with pytest.raises(ConfigError, match="option 'prefill_backend'"):
        RouterOptions(prefill_backend=["nowhere"])
