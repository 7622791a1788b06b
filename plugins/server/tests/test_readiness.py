"""Health, readiness, backpressure, deadlines, and what the headers of a request say."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from fastapi import FastAPI
from toolkit_lm.engine import EngineState
from toolkit_lm.errors import QueueFullError
from toolkit_lm_server.app import create_app, create_early_app, create_router
from toolkit_lm_server.health import Readiness
from toolkit_lm_server.keys import Keys
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.start_gate import StartGate

pytestmark = pytest.mark.anyio
COMPLETE = "/v1/completions"
API = [
    ("POST", "/v1/chat/completions"),
    ("POST", COMPLETE),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
]
TRACE = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "vendor=1",
}


@pytest.mark.parametrize(
    ("status", "reason", "live", "retry"),
    [
        ("starting", "", 200, True),
        ("restarting", "MemoryError: no more", 200, True),
        ("stalled", "no progress for 130 s", 503, True),
        ("dead", "MemoryError: no more", 503, False),
        ("closed", "", 503, False),
    ],
)
async def test_an_engine_that_is_not_ready(engine, client_of, status, reason, live, retry):
    engine.status = status
    engine.reason = reason
    async with client_of(create_app(engine, metrics=Metrics())) as client:
        found = await client.get("/live")
        assert (found.status_code, found.json()) == (
            live,
            {"status": status} | ({"reason": reason} if reason else {}),
        )
        for path in ("/health", "/ready"):
            ready = await client.get(path)
            assert (ready.status_code, ready.json()) == (503, found.json())
        for method, path in API:
            response = await client.request(method, path, json={"prompt": "a"})
            assert (response.status_code, response.json()["error"]["code"]) == (
                503,
                f"engine_{status}",
            )
            assert (reason or status) in response.json()["error"]["message"]
            assert ("retry-after" in response.headers) == retry
        assert [(await client.get(path)).status_code for path in ("/version", "/metrics")] == [
            200,
            200,
        ]
    assert engine.asked == []


async def test_a_ready_engine(client):
    for path in ("/live", "/health", "/ready"):
        response = await client.get(path)
        assert (response.status_code, response.json()) == (200, {"status": "ready"})


async def test_several_engines_are_told_each(client, engine):
    engine.engines = [EngineState("ready", "", 7, 2, 40, 1), EngineState("dead", "it was killed")]
    expected = [
        {
            "engine": 0,
            "status": "ready",
            "requests_in_flight": 2,
            "tokens_in_flight": 40,
            "restarts": 1,
        },
        {
            "engine": 1,
            "status": "dead",
            "reason": "it was killed",
            "requests_in_flight": 0,
            "tokens_in_flight": 0,
            "restarts": 0,
        },
    ]
    for path in ("/live", "/health", "/ready"):
        response = await client.get(path)
        assert (response.status_code, response.json()) == (
            200,
            {"status": "ready", "engines": expected},
        )


async def test_health_needs_no_key(engine, client_of):
    async with client_of(create_app(engine, ServerOptions(api_key="secret"))) as client:
        assert [
            (await client.get(path)).status_code for path in ("/live", "/health", "/ready")
        ] == [200] * 3
        engine.status = "starting"
        assert (await client.post(COMPLETE, json={"prompt": "a"})).status_code == 401


@pytest.mark.parametrize("header", [{"authorization": "Bearer secret"}, {"x-api-key": "secret"}])
async def test_requests_with_a_key_wait_for_the_engine(engine, client_of, header):
    engine.status = "starting"
    options = ServerOptions(api_key="secret")
    readiness = Readiness(engine)
    gate = StartGate(
        create_early_app(options, Metrics(), readiness), Keys.of(options), start_timeout=30
    )
    async with client_of(gate) as client:
        assert (await client.get("/live")).status_code == 200
        assert (await client.post(COMPLETE, json={"prompt": "a"})).status_code == 401
        waits = asyncio.create_task(client.post(COMPLETE, json={"prompt": "a"}, headers=header))
        await asyncio.sleep(0.05)
        assert not waits.done()
        gate.app = create_app(engine, options, readiness=readiness)
        engine.status = "ready"
        gate.open()
        assert (await waits).status_code == 200


async def test_an_engine_that_is_being_made(engine, client_of):
    """What answers before there is a config says what the engine's own routes say later."""
    engine.status = "starting"
    engine.reason = "configuring"
    options = ServerOptions(api_key="secret")
    key = {"authorization": "Bearer secret"}
    readiness = Readiness(engine)
    early = create_early_app(options, Metrics(), readiness)
    async with (
        client_of(early) as one,
        client_of(create_app(engine, options, metrics=Metrics(), readiness=readiness)) as other,
    ):
        for draining in (False, True):
            readiness.draining = draining
            for method, path in [
                *API,
                ("GET", "/live"),
                ("GET", "/health"),
                ("GET", "/version"),
                ("GET", "/metrics"),
            ]:
                for headers in ({}, key):
                    sent = {"headers": {**headers, "x-request-id": "id-1"}, "json": {"prompt": "a"}}
                    first, second = [
                        await client.request(method, path, **sent) for client in (one, other)
                    ]
                    if path == "/metrics":
                        # The figures change from one to the next, and with them the length.
                        del first.headers["content-length"], second.headers["content-length"]
                    else:
                        assert first.text == second.text, path
                    assert (first.status_code, first.headers) == (
                        second.status_code,
                        second.headers,
                    ), path
        assert (await one.get("/metrics", headers=key)).text.count(
            'toolkit_lm_engine_status{model_name="fake",status="starting"} 1.0'
        ) == 1
        # Whether there will be such a route is not known yet.
        assert (await one.get("/of-a-plugin", headers=key)).status_code == 503


async def test_a_server_that_is_being_stopped(engine, client_of):
    readiness = Readiness(engine)
    readiness.draining = True
    async with client_of(create_app(engine, readiness=readiness)) as client:
        assert (await client.get("/live")).status_code == 200
        assert (await client.get("/health")).json() == {"status": "draining"}
        response = await client.post(COMPLETE, json={"prompt": "a"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "server_stopping")
        assert (
            response.headers["connection"] == "close" and int(response.headers["retry-after"]) > 0
        )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue(client, engine, stream):
    engine.failure = QueueFullError("the engine is busy: 8 requests wait already.", 1.2)
    response = await client.post(
        COMPLETE, json={"prompt": ["a", "bc"], "stream": stream, "max_tokens": 2}
    )
    if stream:
        # The first prompt had its answer already.
        assert response.status_code == 200 and '"code":"rate_limit_exceeded"' in response.text
    else:
        assert (response.status_code, response.headers["retry-after"]) == (429, "2")
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_exceeded", "rate_limit_exceeded")
    assert engine.num_open == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_before_the_first_token(client, engine, stream):
    response = await client.post(
        COMPLETE, json={"prompt": "late", "timeout": 0.5, "stream": stream}
    )
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
    assert engine.num_open == 0


async def test_a_deadline_after_some_tokens(client, engine):
    reply = (await client.post(COMPLETE, json={"prompt": "abcdef", "timeout": 2, "n": 2})).json()
    assert [(choice["text"], choice["finish_reason"]) for choice in reply["choices"]] == [
        ("ABC", "timeout")
    ] * 2
    body = {"messages": [{"role": "user", "content": "hi"}], "timeout": 2.5, "stream": True}
    assert (
        '"finish_reason":"timeout"' in (await client.post("/v1/chat/completions", json=body)).text
    )
    assert [options["timeout"] for _, _, options in engine.asked] == [2, 2.5]


@pytest.mark.parametrize(
    "field",
    [
        {"timeout": 0},
        {"timeout": -1},
        {"timeout": 1e300},
        {"timeout": "1"},
        {"cache_salt": ""},
        {"cache_salt": 5},
    ],
)
async def test_bad_request_options(client, field):
    response = await client.post(COMPLETE, json={"prompt": "a", **field})
    assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(field)))


async def test_the_trace_and_the_salt_reach_the_engine(client, engine):
    response = await client.post(
        COMPLETE,
        json={"prompt": "a", "cache_salt": "tenant"},
        headers={**TRACE, "x-request-id": "id-1"},
    )
    [(_, _, options)] = engine.asked
    assert options["cache_salt"] == "tenant"
    assert options["context"] == {
        "route": COMPLETE,
        "request_id": "id-1",
        "client": "127.0.0.1",
        **TRACE,
    }
    assert response.headers["x-request-id"] == "id-1"


@pytest.mark.parametrize("bad", ["", "a b", "x" * 129, "é".encode("latin-1")])
async def test_a_request_id_that_is_no_word_is_replaced(client, bad):
    ids = [
        (await client.post(COMPLETE, json={"prompt": one}, headers={"x-request-id": bad})).headers[
            "x-request-id"
        ]
        for one in ("a", "")
    ]
    assert all(len(found) == 32 for found in ids) and ids[0] != ids[1]


async def test_headers_without_bounds_are_dropped(client, engine):
    headers = {"traceparent": "0" * 129, "tracestate": "x" * 5000}
    await client.post(COMPLETE, json={"prompt": "a"}, headers=headers)
    assert set(engine.asked[0][2]["context"]) == {"route", "request_id", "client"}


async def test_the_routes_for_operators_are_off_unless_asked_for(engine, client_of):
    async with client_of(create_app(engine)) as client:
        assert (await client.post("/reset_prefix_cache")).status_code == 404
    async with client_of(
        create_app(engine, ServerOptions(admin_routes=True, api_key="secret"))
    ) as client:
        assert (await client.post("/reset_prefix_cache")).status_code == 401
        assert (
            await client.post("/reset_prefix_cache", headers={"authorization": "Bearer secret"})
        ).status_code == 200
    assert engine.num_resets == 1


async def test_mounted_in_an_app_with_a_lifespan_of_its_own(make_engine, client_of):
    """The app makes the engine when it starts, and its own state and routes stay as they are."""

    @contextlib.asynccontextmanager
    async def lifespan(app):
        app.include_router(create_router(make_engine(), ServerOptions()), prefix="/llm")
        yield {"request_id": "the app's"}

    app = FastAPI(lifespan=lifespan)

    @app.get("/own")
    async def own() -> dict[str, str]:
        return {"own": "yes"}

    async with app.router.lifespan_context(app), client_of(app) as client:
        assert (await client.get("/own")).json() == {"own": "yes"}
        assert (await client.get("/llm/ready")).status_code == 200
        assert (await client.post("/llm" + COMPLETE, json={"prompt": "ab"})).json()["choices"][0][
            "text"
        ] == "AB"
        assert (
            await client.post("/llm" + COMPLETE, json={"prompt": "ab", "stream": True})
        ).text.endswith("data: [DONE]\n\n")


async def test_the_gate_of_a_server_that_starts(engine, client_of):
    """Requests wait for the engine, and no longer than start_timeout; polls and clients without a
    key do not wait."""
    engine.status = "starting"
    options = ServerOptions(api_key="secret")
    key = {"authorization": "Bearer secret"}
    readiness = Readiness(engine)
    early = create_early_app(options, Metrics(), readiness)
    body = {"prompt": "ab"}
    for seconds in (0.05, 60):
        gate = StartGate(early, Keys.of(options), seconds)
        async with client_of(gate) as client:
            assert (await client.get("/health")).status_code == 503
            assert (await client.post(COMPLETE, json=body)).status_code == 401
            asking = asyncio.create_task(client.post(COMPLETE, json=body, headers=key))
            if seconds < 1:
                assert (await asking).json()["error"]["code"] == "engine_starting"
                continue
            await asyncio.sleep(0.2)
            assert not asking.done()
            engine.status = "ready"
            gate.app = create_app(engine, options, readiness=readiness)
            gate.open()
            assert (await asking).json()["choices"][0]["text"] == "AB"
