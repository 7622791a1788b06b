"""The router in front of stubs: what it passes on, what it does when they fail, who may do what."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from toolkit_lm.errors import ConfigError
from toolkit_lm_router.options import RouterOptions, check_url
from toolkit_lm_router.routing import Routing

pytestmark = pytest.mark.anyio


def event(choices: list[dict], **more: object) -> bytes:
    head = {"id": "x", "created": 1, "choices": choices, **more}
    return b"data: " + json.dumps(head).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def texts(stream: bytes) -> str:
    found = [json.loads(line[6:]) for line in stream.split(b"\n\n") if line and DONE[:-2] != line]
    return "".join(c.get("text", "") for e in found for c in e.get("choices", ()))


async def test_a_stream_is_passed_on_byte_for_byte(make_routing, make_stub):
    backend = make_stub(owner="somebody")
    backend.parts = [
        b": comment\n\n",
        b'data: {"choices":[],  "odd" :1}\n',
        b"\n",
        b"event: x\ndata: 1\ndata: 2\n\ndata: \xff\n\n",
        DONE,
    ]
    async with make_routing(backend) as routed:
        _, stream = await routed.post(stream=True, prompt="a")
    assert stream == b"".join(backend.parts)


async def test_a_stream_comes_as_it_is_made(make_routing, make_stub):
    backend = make_stub()
    first = event([{"index": 0, "text": "a"}])
    backend.parts = [first, 30.0, DONE]
    async with (
        make_routing(backend) as routed,
        routed.client.post(routed.url + "/v1/completions", data=b'{"stream":true}') as answer,
    ):
        assert await answer.content.readany() == first


async def test_headers(make_routing, make_stub):
    backend = make_stub()
    backend.headers = {
        "X-Kept": "1",
        "Connection": "X-Dropped",
        "X-Dropped": "1",
        "Server": "secret",
    }
    sent = {
        "Authorization": "Bearer client",
        "X-Request-ID": "abc",
        "X-Forwarded-For": "10.9.9.9",
        "X-Forwarded-Host": "evil",
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "1",
        "TE": "trailers",
        "traceparent": "00-1-1-01",
    }
    async with (
        make_routing(backend) as routed,
        routed.client.post(
            routed.url + "/v1/completions?a=%20b", data=b"{}", headers=sent
        ) as answer,
    ):
        assert answer.headers["X-Kept"] == "1"
        assert answer.headers["X-Request-ID"] == "abc"
        assert "X-Dropped" not in answer.headers
        assert answer.headers.get("Server") != "secret"
    [(target, got, _)] = backend.asked
    assert target == "/v1/completions?a=%20b"
    assert got["Authorization"] == "Bearer client"
    assert got["X-Request-ID"] == "abc"
    assert got["traceparent"] == "00-1-1-01"
    assert got["Host"] == backend.url.removeprefix("http://")
    assert got["X-Forwarded-Host"] == routed.url.removeprefix("http://")
    assert got["X-Forwarded-For"].startswith("10.9.9.9, ")
    assert not {"X-Hop", "TE"} & got.keys()


async def test_the_key_of_backends_replaces_the_clients(make_routing, make_stub):
    backend = make_stub()
    async with make_routing(backend, backend_key="inner", api_key="outer") as routed:
        assert (await routed.post(prompt="a"))[0] == 401
        assert (await routed.get("/v1/models"))[0] == 401
        for name, value in (("Authorization", "Bearer outer"), ("X-Api-Key", "outer")):
            assert (await routed.post(headers={name: value}, prompt="a"))[0] == 200
    assert len(backend.asked) == 2
    for _, got, _ in backend.asked:
        assert got["Authorization"] == "Bearer inner"
        assert "outer" not in str(got)


async def test_an_unknown_model_is_told_with_the_nearest(make_routing, make_stub):
    async with make_routing(make_stub(("llama-8b", "adapter"))) as routed:
        status, body = await routed.post(model="lama-8b", prompt="a")
        assert status == 404
        assert "Did you mean 'llama-8b'?" in json.loads(body)["error"]["message"]
        assert (await routed.post(model="adapter", prompt="a"))[0] == 200


async def test_a_model_goes_to_those_that_serve_it(make_routing, make_stub):
    both = [make_stub(("a", "shared")), make_stub(("b", "shared"))]
    async with make_routing(*both) as routed:
        for _ in range(5):
            assert (await routed.post(model="b", prompt="x"))[0] == 200
        _, body = await routed.get("/v1/models")
    assert [len(backend.asked) for backend in both] == [0, 5]
    found = {card["id"]: card["backends"] for card in json.loads(body)["data"]}
    assert found == {"a": 1, "b": 1, "shared": 2}


async def test_a_backend_that_cannot_be_reached_is_left_out(make_routing, make_stub):
    both = [make_stub(), make_stub()]
    async with make_routing(*both, health_interval=60.0) as routed:
        await both[0].stop()
        answers = await asyncio.gather(*(routed.post(prompt="a") for _ in range(20)))
        assert [status for status, _ in answers] == [200] * 20
        assert routed.fleet.backends[both[0].url].state == "down"


@pytest.mark.parametrize("status", [502, 503])
async def test_one_that_does_not_serve_now_rests(make_routing, make_stub, status):
    both = [make_stub(), make_stub()]
    both[0].status = status
    both[0].headers = {"Retry-After": "30"}
    async with make_routing(*both) as routed:
        for _ in range(20):
            assert (await routed.post(prompt="a"))[0] == 200
    assert len(both[0].asked) <= 1


@pytest.mark.parametrize("status", [400, 404, 429, 500, 504])
async def test_other_errors_are_the_clients(make_routing, make_stub, status):
    both = [make_stub(), make_stub()]
    for backend in both:
        backend.status = status
        backend.headers = {"Retry-After": "3"}
    async with (
        make_routing(*both) as routed,
        routed.client.post(routed.url + "/v1/completions", data=b"{}") as answer,
    ):
        assert (answer.status, answer.headers["Retry-After"]) == (status, "3")
        assert json.loads(await answer.read()) == {"error": {"message": "no"}}
    assert sum(len(backend.asked) for backend in both) == 1


async def test_the_last_one_that_does_not_serve_is_told(make_routing, make_stub):
    backend = make_stub()
    backend.status = 503
    backend.headers = {"Retry-After": "7"}
    async with (
        make_routing(backend) as routed,
        routed.client.post(routed.url + "/v1/completions", data=b"{}") as answer,
    ):
        assert (answer.status, answer.headers["Retry-After"]) == (503, "7")


async def test_what_is_stored_is_not_sent_twice(make_routing, make_stub):
    both = [make_stub(), make_stub()]
    for backend in both:
        backend.parts = []
        backend.breaks = True
    async with make_routing(*both) as routed:
        status, body = await routed.post("/v1/responses", stream=True, store=True, input="a")
    assert status == 502
    assert "stored" in json.loads(body)["error"]["message"]
    assert sum(len(backend.asked) for backend in both) == 1


@pytest.mark.parametrize("asks", [False, True])
async def test_a_stream_goes_on_elsewhere(make_routing, make_stub, asks):
    more = {"return_token_ids": True} if asks else {}
    both = [make_stub(), make_stub()]
    pieces = [event([{"index": 0, "text": t, "token_ids": [i]}]) for i, t in enumerate("abcdef")]
    end = event([{"index": 0, "text": "", "finish_reason": "length"}])
    for backend in both:
        backend.parts = [*pieces, end, DONE]
    async with make_routing(*both) as routed:
        _, whole = await routed.post(stream=True, prompt="p", **more)
        # The first to be asked breaks off in the middle of an event.
        first, other = both if both[0].asked else both[::-1]
        first.parts = [*pieces[:3], pieces[3][:20]]
        first.breaks = True
        # Events of others are cut elsewhere, and have another id.
        joined = [{"index": 0, "text": "ab", "token_ids": [0, 1]}]
        rest = [{"index": 0, "text": "cdef", "token_ids": [2, 3, 4, 5]}]
        other.parts = [event(joined, id="y"), event(rest, id="y"), end, DONE]
        first.asked.clear()
        other.asked.clear()
        while not first.asked:
            status, stream = await routed.post(stream=True, prompt="p", **more)
            assert status == 200
            assert texts(stream) == texts(whole) == "abcdef"
        _, figures = await routed.get("/metrics")
    found = [json.loads(e[6:]) for e in stream.split(b"\n\n") if e.startswith(b"data: {")]
    ids = [i for e in found for c in e["choices"] for i in c.get("token_ids", ())]
    assert ids == [*range(6)] * asks
    assert {e["id"] for e in found} == {"x"}
    assert stream.endswith(DONE)
    [(_, _, sent)] = first.asked
    # The other one is told what the first has drawn, with the same seed.
    fields = json.loads(sent)
    assert fields["return_token_ids"] is True
    begun = [json.loads(body) for _, _, body in other.asked]
    assert {**fields, "begun_token_ids": [0, 1, 2]} in begun
    line = f'toolkit_lm_router_migrations_total{{backend="{first.url}"}} 1.0'
    assert line in figures.decode()


async def test_another_answer_is_an_error_and_no_mixture(make_routing, make_stub):
    both = [make_stub(), make_stub()]
    async with make_routing(*both) as routed:
        for one, texts_of in zip(both, (["ab", "cd"], ["ax", "yz"]), strict=True):
            one.parts = [event([{"index": 0, "text": text}]) for text in texts_of]
            one.breaks = True
        _, stream = await routed.post(stream=True, prompt="p")
    assert texts(stream) in ("abcd", "axyz")
    assert b"another answer" in stream
    assert stream.endswith(DONE)


async def test_a_shorter_answer_is_another_one(make_routing, make_stub):
    both = [make_stub(), make_stub()]
    async with make_routing(*both) as routed:
        for backend in both:
            backend.parts = [event([{"index": 0, "text": "abc"}])]
            backend.breaks = True
        await routed.post(stream=True, prompt="p")
        first, other = both if len(both[0].asked) else both[::-1]
        other.breaks = False
        other.parts = [event([{"index": 0, "text": "ab", "finish_reason": "stop"}]), DONE]
        first.asked.clear()
        while not first.asked:
            _, stream = await routed.post(stream=True, prompt="p")
    assert b"another answer" in stream


async def test_a_foreign_stream_ends_with_an_error(make_routing, make_stub):
    both = [make_stub(owner="vllm"), make_stub(owner="vllm")]
    for backend in both:
        backend.parts = [event([{"index": 0, "text": "a"}]), b'data: {"half']
        backend.breaks = True
    async with make_routing(*both) as routed:
        _, stream = await routed.post(stream=True, prompt="p")
        _, named = await routed.post("/v1/messages", stream=True, messages=[])
    events = stream.split(b"\n\n")
    assert events[0] == event([{"index": 0, "text": "a"}])[:-2]
    assert json.loads(events[1][6:])["error"]["code"] == "backend_failed"
    assert b'"seed"' not in both[0].asked[0][2] if both[0].asked else True
    assert b"\n\nevent: error\ndata: " in named


async def test_an_engine_that_died_is_a_break(make_routing, make_stub):
    both = [make_stub(), make_stub()]
    good = [event([{"index": 0, "text": t}]) for t in "abc"]
    dead = b'data: {"error":{"message":"dead","code":"engine_dead"}}\n\n'
    async with make_routing(*both) as routed:
        both[0].parts = [good[0], dead, DONE]
        both[1].parts = [*good, DONE]
        while not both[0].asked:
            _, stream = await routed.post(stream=True, prompt="p")
            assert texts(stream) == "abc"
            assert b"dead" not in stream


async def test_a_client_that_leaves_ends_the_request(make_routing, make_stub):
    backend = make_stub()
    backend.gate.clear()
    async with make_routing(backend) as routed:
        asking = asyncio.create_task(routed.post(prompt="a"))
        while not backend.asked:
            await asyncio.sleep(0.01)
        asking.cancel()
        while not backend.num_left:
            await asyncio.sleep(0.01)
        assert routed.fleet.backends[backend.url].load == 0


async def test_a_slow_reader_slows_the_backend_down(make_routing, make_stub):
    backend = make_stub()
    sent = 0

    part = event([{"index": 0, "text": "x" * 60_000}])

    async def stream(request):
        nonlocal sent
        from aiohttp import web

        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(2000):
            await response.write(part)
            sent += len(part)
        return response

    backend._stream = stream
    async with (
        make_routing(backend) as routed,
        routed.client.post(routed.url + "/v1/completions", data=b'{"stream":true}') as answer,
    ):
        await answer.content.readany()
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.5)
        # 120 MB in all; buffers of the kernel and of both ends hold a few.
        assert sent < 40_000_000


async def test_requests_wait_for_room_and_clients_take_turns(make_routing, make_stub):
    backend = make_stub()
    backend.gate.clear()
    async with make_routing(backend, max_backend_requests=2, max_queued_requests=3) as routed:
        asking = [asyncio.create_task(routed.post(prompt="a")) for _ in range(6)]
        [refused], rest = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        status, body = refused.result()
        assert (status, json.loads(body)["error"]["code"]) == (503, "server_busy")
        while len(backend.asked) < 2:
            await asyncio.sleep(0.01)
        _, figures = await routed.get("/metrics")
        assert b"toolkit_lm_router_waiting 3.0" in figures
        backend.gate.set()
        assert [status for status, _ in await asyncio.gather(*rest)] == [200] * 5


async def test_bodies_are_bounded(make_routing, make_stub):
    backend = make_stub()
    async with make_routing(backend, max_body_size="1MiB") as routed:
        status, _ = await routed.post(prompt="a" * 2**20)
        assert status == 413
        status, body = await routed.post(prompt="a" * (2**20 - 100))
        assert (status, json.loads(body)["got"] > 2**19) == (200, True)


@pytest.mark.parametrize("size", [10, 2**21])
async def test_bodies_arrive_as_they_were_sent(make_routing, make_stub, size):
    backend = make_stub()
    async with make_routing(backend) as routed:
        await routed.post(prompt="ä" * size)
    [(_, headers, body)] = backend.asked
    assert json.loads(body) == {"prompt": "ä" * size}
    assert headers["Content-Length"] == str(len(body))


async def test_paths(make_routing, make_stub):
    backend = make_stub()
    async with make_routing(backend) as routed:
        for path in ("/v1/chat/completionz", "/reset_prefix_cache", "/pause", "/v1/files", "//x"):
            assert (await routed.post(path))[0] == 404
        status, _ = await routed.get("/v1/completions")
        assert status == 405
        status, body = await routed.post("/v1/responses", previous_response_id="r")
        assert (status, json.loads(body)["error"]["param"]) == (501, "previous_response_id")
        # Nobody may without a key of operators.
        assert (await routed.get("/router/backends"))[0] == 404
    assert backend.asked == []


async def test_a_host_serves_the_app_below_a_path(make_stub):
    """Backends know nothing of that path."""
    backend = make_stub()
    await backend.start()
    try:
        async with Routing(RouterOptions(backend=[backend.url])) as routing:
            await routing.watch.check(routing.fleet.backends[backend.url])
            transport = httpx.ASGITransport(routing.app, root_path="/llm")
            async with httpx.AsyncClient(transport=transport, base_url="http://host/llm") as client:
                body = {"prompt": "p", "stream": True}
                for path in ("/v1/completions", "/v1/embeddings?a=1"):
                    assert (await client.post(path, json=body)).status_code == 200
                wrong = await client.post("/v1/completion", json=body)
                assert wrong.status_code == 404
                assert "/v1/completions" in wrong.json()["error"]["message"]
    finally:
        await backend.stop()
    assert [path for path, _, _ in backend.asked] == ["/v1/completions", "/v1/embeddings?a=1"]
    # It is a stream that can go on elsewhere.
    assert b'"seed"' in backend.asked[0][2]


async def test_operators_list_add_drain_and_remove(make_routing, make_stub):
    both = [make_stub(), make_stub()]
    await both[1].start()
    key = {"Authorization": "Bearer ops"}
    async with make_routing(both[0], admin_key="ops", api_key="client") as routed:
        for wrong in ({}, {"Authorization": "Bearer client"}):
            assert (await routed.get("/router/backends", wrong))[0] == 401
            added = await routed.post("/router/backends/add", wrong, url=both[1].url)
            assert added[0] == 401
        assert (await routed.post("/router/backends/add", key, url=both[1].url))[0] == 200
        await routed.until("ready", both[1])
        both[0].gate.clear()
        client = {"Authorization": "Bearer client"}
        asking = [asyncio.create_task(routed.post(headers=client, prompt="a")) for _ in range(8)]
        while len(both[0].asked) + len(both[1].asked) < 8 or not both[0].asked:
            await asyncio.sleep(0.01)
        _, body = await routed.post("/router/backends/drain", key, url=both[0].url)
        drained = json.loads(body)
        assert (drained["state"], drained["inflight"]) == ("draining", len(both[0].asked))
        before = len(both[0].asked)
        for _ in range(6):
            assert (await routed.post(headers=client, prompt="a"))[0] == 200
        assert len(both[0].asked) == before
        both[0].gate.set()
        assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 8
        _, body = await routed.get("/router/backends", key)
        assert [b["inflight"] for b in json.loads(body)["backends"]] == [0, 0]
        assert (await routed.post("/router/backends/remove", key, url=both[0].url))[0] == 200
        status, body = await routed.post("/router/backends/remove", key, url=both[0].url)
        assert status == 404
        for url in ("file:///etc/passwd", "http://a@b", "http://", "http://h/?q=1", "http://h:0"):
            assert (await routed.post("/router/backends/add", key, url=url))[0] == 400
    await both[1].stop()


async def test_a_stop_lets_requests_end(make_routing, make_stub):
    backend = make_stub()
    backend.gate.clear()
    async with make_routing(backend) as routed:
        asking = asyncio.create_task(routed.post(prompt="a"))
        while not backend.asked:
            await asyncio.sleep(0.01)
        routed.running.stop()
        await asyncio.sleep(0.2)
        assert (await routed.post(prompt="b"))[0] == 503
        assert (await routed.get("/health"))[0] == 503
        backend.gate.set()
        assert (await asking)[0] == 200


async def test_a_restart_forgets_the_prefixes(make_routing, make_stub):
    backend = make_stub()
    async with make_routing(backend) as routed:
        await routed.post(prompt="a" * 4000)
        assert len(routed.fleet.policy.index) == 10
        backend.health = 503
        await routed.until("down", backend)
        assert len(routed.fleet.policy.index) == 0
        status, _ = await routed.get("/health")
        assert status == 503
        backend.health = 200
        await routed.until("ready", backend)
        await routed.post(prompt="a" * 4000)
        assert len(routed.fleet.policy.index) == 10
        backend.created = 2
        while len(routed.fleet.policy.index):
            await asyncio.sleep(0.02)


async def test_a_request_waits_for_its_only_backend(make_routing, make_stub):
    backend = make_stub()
    async with make_routing(backend) as routed:
        backend.health = 503
        await routed.until("down", backend)
        asking = asyncio.create_task(routed.post(prompt="a"))
        await asyncio.sleep(0.2)
        assert not asking.done()
        backend.health = 200
        assert (await asking)[0] == 200


@pytest.mark.parametrize(
    "url",
    ["", "h:1", "ftp://h", "http://", "http://u:p@h", "http://h?q", "http://h#f", "http://h:x"],
)
def test_a_wrong_url_is_an_error(url):
    with pytest.raises(ConfigError, match="backend"):
        RouterOptions(backend=[url])


def test_urls_are_tidied():
    assert check_url("http://h:1/v1/") == "http://h:1"
    assert check_url("https://h/prefix/") == "https://h/prefix"
