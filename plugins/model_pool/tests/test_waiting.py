"""Streams that wait for their model: comments, and then the answer or an error of the API."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from test_pool_routes import models
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm_model_pool import waiting
from toolkit_lm_model_pool.app import make_pool_app
from toolkit_lm_model_pool.pool import Pool
from toolkit_lm_model_pool.transitions import failure_of, wake
from toolkit_lm_model_pool.waiting import progress_text
from toolkit_lm_server.app import create_app
from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.health import Readiness
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions

PATHS = [*waiting.STREAMS, "/chat/completions/"]
WITHOUT = {
    "/api/chat": "lines of JSON",
    "/api/generate": "lines of JSON",
    "/v1/chat/completions/batch": "whole answers",
    "/v1/messages/count_tokens": "whole answers",
}
"""Routes whose body has `stream`, and which have no comments, with the reason."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def comments(monkeypatch):
    """The texts of the comments so far. They are sent often."""
    texts = []

    def text_of(model, now):
        texts.append(progress_text(model, now))
        return texts[-1]

    monkeypatch.setattr(waiting, "progress_text", text_of)
    monkeypatch.setattr(waiting, "PERIOD", 0.01)
    return texts


def made(timeout: float, **options):
    """A pool that loads nothing by itself, and a client of it."""
    pool = Pool(models("a", "b"), 2**33, turn=1, timeout=timeout)
    app = make_pool_app(pool, ServerOptions(**options), Metrics(), Readiness(pool), None, list)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://pool")
    return pool, client


async def loaded(pool: Pool, comments: list[str], app: FastAPI | None) -> None:
    """Loads the model "a", whose routes are the app, once comments have told both states. None: the
    load fails."""
    model = pool.models["a"]
    while not comments:
        await asyncio.sleep(0)
    model.state = "loading"
    while comments[-1][:7] != "loading":
        await asyncio.sleep(0)
    if app is None:
        model.failed("it is broken.", time.monotonic())
        wake(model, failure_of(model, time.monotonic()))
        return
    model.state = "ready"
    model.app = app
    wake(model)


def parts_of(text: str) -> tuple[list[str], list[str]]:
    """Comments and events of a stream."""
    parts = [part for part in text.split("\n\n") if part]
    comments = [part for part in parts if part.startswith(":")]
    assert parts[: len(comments)] == comments, text
    return comments, parts[len(comments) :]


def data_of(event: str) -> dict:
    [line] = [line for line in event.split("\n") if line.startswith("data: ")]
    return json.loads(line.removeprefix("data: "))


def told(path: str, events: list[str]) -> str:
    """The message of the error that ends a stream, in the shape of the path's API."""
    first, *rest = events
    data = data_of(first)
    match path:
        case "/v1/messages":
            assert first.startswith("event: error\n") and data["type"] == "error" and not rest
            assert data["error"]["type"] in ("overloaded_error", "invalid_request_error")
            return data["error"]["message"]
        case "/v1/responses":
            assert first.startswith("event: error\n") and not rest
            assert {"type", "code", "message", "param", "sequence_number"} == {*data}
            return data["message"]
        case "/v2/chat":
            assert data["type"] == "message-end" and not rest
            return data["delta"]["error"]
        case "/completion":
            assert not rest
        case _:
            assert rest == ["data: [DONE]"]
    return data["error"]["message"]


@pytest.mark.anyio
@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_that_waits_in_vain_ends_in_an_error_of_its_api(path, comments):
    pool, client = made(100)
    body = {"model": "a", "stream": True}
    sent = {"data": body, "files": {"file": b""}} if "audio" in path else {"json": body}
    asking = client.post(path, **sent, headers={"x-request-id": "mine"})
    answer, _ = await asyncio.gather(asking, loaded(pool, comments, None))
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-request-id"] == "mine"
    sent_comments, events = parts_of(answer.text)
    assert sent_comments == [f": {text}" for text in comments]
    assert (comments[0], comments[-1]) == ("waiting for a", "loading a 0%")
    assert "it is broken" in told(path, events)


@pytest.mark.anyio
@pytest.mark.parametrize("path", PATHS)
async def test_a_refusal_after_the_load_is_an_event(path, comments):
    pool, client = made(100)
    app = FastAPI()

    @app.post(path)
    async def refuse() -> JSONResponse:
        return ApiError(400, "temperature is wrong", param="temperature").response()

    body = {"model": "a", "stream": "true"}
    sent = (
        {"data": body, "files": {"file": b""}}
        if "audio" in path
        else {"json": {**body, "stream": True}}
    )
    answer, _ = await asyncio.gather(client.post(path, **sent), loaded(pool, comments, app))
    _, events = parts_of(answer.text)
    assert told(path, events) == "temperature is wrong"


@pytest.mark.anyio
async def test_a_stream_goes_on_after_its_comments(comments):
    pool, client = made(100)
    config = VllmConfig.make(
        model="tiny", served_model_name=["a"], engine_process=False, num_kv_blocks=64, device="cpu"
    )
    async with AsyncLLM(config) as llm:
        app = create_app(llm)
        body = {"model": "a", "prompt": "a", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer, _ = await asyncio.gather(
            client.post("/v1/completions", json={**body, "stream": True}),
            loaded(pool, comments, app),
        )
        sent, events = parts_of(answer.text)
        assert sent and events[-1] == "data: [DONE]"
        text = "".join(data_of(event)["choices"][0]["text"] for event in events[:-1])
        # It is ready now: there is nothing to tell.
        whole = await client.post("/v1/completions", json=body)
        assert whole.json()["choices"][0]["text"] == text
        again = await client.post("/v1/completions", json={**body, "stream": True})
        assert parts_of(again.text)[0] == []


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body", "options"),
    [
        ("/v1/chat/completions", {}, {}),
        ("/v1/chat/completions", {"stream": False}, {}),
        ("/v1/chat/completions", {"stream": True}, {"sse_keep_alive": None}),
        *((path, {"stream": True}, {}) for path in WITHOUT),
    ],
)
async def test_other_answers_wait_in_silence(path, body, options):
    _, client = made(0.15, **options)
    answer = await client.post(path, json={"model": "a", **body})
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert answer.json()["error"]["code"] == "model_loading"


@pytest.mark.anyio
async def test_each_route_that_streams_is_known():
    config = VllmConfig.make(
        model="tiny", engine_process=False, num_kv_blocks=64, dtype="float32", device="cpu"
    )
    seen = set()
    async with AsyncLLM(config) as llm:
        for routes in (None, ["llama_cpp"], ["sglang"]):
            app = create_app(llm, ServerOptions(routes=routes))
            for route in app.routes:
                if isinstance(route, APIRoute) and "POST" in route.methods:
                    contents = route.responses.get(200, {}).get("content", {})
                    if "text/event-stream" in contents:
                        seen.add(route.path)
    assert len(seen) >= 7
    assert {path for path in seen if waiting.stream_class(path) is None} == set()
    # The model of this test hears nothing.
    assert {*waiting.STREAMS} - seen == {"/v1/audio/transcriptions", "/v1/audio/translations"}


@pytest.mark.anyio
async def test_a_load_tells_its_progress():
    [model] = models("a")
    model.prepare(2**33)
    assert model.progress(0.0) is None
    model.state = "loading"
    model.began = 100.0
    assert model.progress(101.0) == 0
    model.resident = model.need.process // 2
    assert 40 <= model.progress(101.0) <= 50
    # The last load tells more.
    model.load_seconds = 4.0
    assert [model.progress(100.0 + seconds) for seconds in (1, 2, 9)] == [25, 50, 99]
    model.sleep_level = 1
    model.wake_seconds = 2.0
    assert model.progress(101.0) == 50
