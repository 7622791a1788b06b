"""The page at `/` and the stream of what it shows."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from contextlib import asynccontextmanager
from importlib.resources import files

import pytest
from toolkit_lm.engine import EngineState
from toolkit_lm.events import LoadEvent, RequestEvent, StepEvent
from toolkit_lm_server.app import create_app, create_early_app
from toolkit_lm_server.health import Readiness
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.ui import page as page_module, watch as watch_module
from toolkit_lm_server.ui.log_tail import LogTail
from toolkit_lm_server.ui.page import Page
from toolkit_lm_server.ui.watch import Watch

pytestmark = pytest.mark.anyio
STATIC = files("toolkit_lm_server.ui") / "static"
KEY = "SECRET-123"
SPACES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML"}
"""Namespaces of drawings and formulas, which no browser loads."""


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """Views come a hundred times a second."""
    monkeypatch.setattr(page_module, "PERIOD", 0.01)
    monkeypatch.setattr(watch_module, "PERIOD", 0.01)


def app_of(engine, metrics, readiness=None, **options):
    options = ServerOptions(**options)
    return create_app(
        engine, options, metrics=metrics, readiness=readiness, page=Page(options, metrics)
    )


class Onlooker:
    """A client of the stream."""

    def __init__(self, news: asyncio.Queue) -> None:
        self._news = news
        self.status = 0

    async def next(self, kind: str) -> dict:
        """The next object of a type. An empty one at the stream's end."""
        while True:
            one = await asyncio.wait_for(self._news.get(), 10)
            if not one or one.get("type") == kind or "error" in one:
                return one


@asynccontextmanager
async def looking(app, key: str | None = None):
    """Asks for /ui/events; leaves at the end."""
    news: asyncio.Queue = asyncio.Queue()
    onlooker = Onlooker(news)
    left = asyncio.Event()
    asked = False
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/ui/events",
        "raw_path": b"/ui/events",
        "root_path": "",
        "query_string": b"",
    }
    scope |= {
        "headers": headers,
        "http_version": "1.1",
        "scheme": "http",
        "client": ("127.0.0.1", 1),
        "server": ("test", 80),
    }

    async def receive():
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.start":
            onlooker.status = message["status"]
            return
        for part in message.get("body", b"").decode().split("\n\n"):
            if part == "data: [DONE]":
                news.put_nowait({})
            elif part.startswith("data: "):
                news.put_nowait(json.loads(part[6:]))
            elif part.startswith("{"):
                news.put_nowait(json.loads(part))

    task = asyncio.ensure_future(app(scope, receive, send))
    try:
        yield onlooker
    finally:
        left.set()
        await asyncio.wait_for(task, 10)


# The files


async def test_the_page_may_be_loaded_by_all(engine, metrics, client_of):
    async with client_of(app_of(engine, metrics, api_key=KEY)) as client:
        page = await client.get("/")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        named = {*re.findall(r'(?:src|href)="(ui/[^"]+)"', page.text), "ui/chat.js"}
        for name in named:
            found = await client.get(f"/{name}")
            assert found.status_code == 200 and found.headers["x-content-type-options"] == "nosniff"
            again = await client.get(f"/{name}", headers={"if-none-match": found.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert (await client.get("/ui/../app.py")).status_code in (401, 404)
        assert (await client.get("/ui/nothing.js")).status_code == 404


async def test_no_page(engine, metrics, client_of):
    async with client_of(create_app(engine, metrics=metrics)) as client:
        assert [
            (await client.get(path)).status_code for path in ("/", "/ui/app.js", "/ui/events")
        ] == [404] * 3


@pytest.mark.parametrize("key", [None, KEY])
async def test_the_description_of_the_api_needs_no_other_host(engine, client_of, key):
    async with client_of(create_app(engine, ServerOptions(api_key=key))) as client:
        found = await client.get("/docs")
        assert found.status_code == (200 if key is None else 404)
        assert (await client.get("/redoc")).status_code == 404
        if key is None:
            assert "default-src 'none'" in found.headers["content-security-policy"]
            for name in re.findall(r'(?:src|href)="(docs/[^"]+)"', found.text):
                assert (await client.get(f"/{name}")).status_code == 200
            assert not [
                path
                for path in (await client.get("/openapi.json")).json()["paths"]
                if "docs" in path or path == "/"
            ]


def test_the_files_are_small_and_name_no_other_host():
    texts = {file.name: file.read_text() for file in STATIC.iterdir()}
    assert sum(len(text) for name, text in texts.items() if not name.startswith("docs")) < 160_000
    for name, text in texts.items():
        assert set(re.findall(r"https?://[^\"' ]+", text)) <= SPACES, name
        # They would make code or markup of text.
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function| "
            r"on\w+=\"",
            text,
        ), name
        assert "style=" not in text, name


# The stream


async def test_who_has_no_key_sees_nothing(engine, metrics):
    app = app_of(engine, metrics, api_key=KEY)
    for key in (None, "wrong"):
        async with looking(app, key) as onlooker:
            assert "error" in await onlooker.next("view") and onlooker.status == 401
    assert metrics.tap is None
    async with looking(app, KEY) as onlooker:
        assert (await onlooker.next("view"))["status"] == "ready" and onlooker.status == 200


async def test_what_is_served(engine, metrics):
    async with looking(app_of(engine, metrics)) as onlooker:
        server = await onlooker.next("server")
        assert server["model"]["name"] == "fake" and server["model"]["tasks"] == ["generate"]
        states = {one["name"]: (one["distribution"], one["status"]) for one in server["plugins"]}
        assert states["server"] == ("toolkit-lm-server", "ok") and states["bench"] == (
            "toolkit-lm-bench",
            "disabled",
        )
        assert server["ready"] and server["docs"] and not server["model"]["takes_images"]
        engine.status = "stalled"
        engine.reason = "no progress for 130 s"
        assert (await onlooker.next("server"))["ready"] is False
        view = await onlooker.next("view")
        assert (view["status"], view["reason"]) == ("stalled", "no progress for 130 s")


async def test_numbers_move(engine, metrics):
    now = time.monotonic()
    request = {"request_id": "a", "arrival_time": now - 2, "num_prompt_tokens": 40}
    async with looking(app_of(engine, metrics)) as onlooker:
        before = await onlooker.next("view")
        assert (before["load"], before["requests"], before["num_steps"]) == (None, [], 0)
        assert before["histograms"]["first_token"]["counts"][-1] == 0
        metrics.toolkit_event(
            StepEvent(
                time=now, duration=0.25, num_tokens=8, num_output_tokens=1, num_output_sequences=1
            )
        )
        metrics.toolkit_event(
            RequestEvent(
                kind="first_token",
                time=now,
                scheduled_time=now - 1,
                first_token_time=now,
                num_cached_tokens=16,
                **request,
            )
        )
        load = {"num_used_blocks": 3, "num_total_blocks": 9, "num_cached_blocks": 2}
        # The busiest moment of a view is shown; then the latest.
        metrics.toolkit_event(LoadEvent(time=now, num_running=1, num_waiting=4, **load))
        metrics.toolkit_event(LoadEvent(time=now, num_running=1, num_waiting=0, **load))
        while not (view := await onlooker.next("view"))["num_steps"]:
            pass
        assert (
            view["num_steps"],
            view["num_tokens"],
            view["num_output_tokens"],
            view["steps"],
        ) == (1, 8, 1, [[250.0, 8]])
        assert {"running": 1, "waiting": 4, "used": 3, "cached": 2, "total": 9}.items() <= view[
            "load"
        ].items()
        assert view["tokens"] == {"prompt": 40, "cached": 16, "output": 1}
        [shown] = view["requests"]
        assert shown["age"] >= 2
        assert {
            "id": "a",
            "state": "running",
            "num_prompt_tokens": 40,
            "num_cached_tokens": 16,
            "first_token": 2,
        }.items() <= shown.items()
        metrics.toolkit_event(
            RequestEvent(
                kind="finished", time=now, finish_reason="stop", num_output_tokens=1, **request
            )
        )
        while (view := await onlooker.next("view"))["requests"]:
            pass
        view = await onlooker.next("view")
        assert (view["num_steps"], view["load"]["waiting"]) == (0, 0)


async def test_several_engines_are_shown_each(engine, metrics):
    engine.engines = [EngineState("ready", "", 7, 2, 40, 1), EngineState("dead", "it was killed")]
    async with looking(app_of(engine, metrics)) as onlooker:
        await onlooker.next("view")
        for number in (0, 1):
            load = {"num_used_blocks": 3, "num_total_blocks": 9, "engine": number}
            metrics.toolkit_event(
                LoadEvent(time=time.monotonic(), num_running=number + 1, num_waiting=0, **load)
            )
        while (view := await onlooker.next("view"))["load"] is None:
            pass
        assert (view["load"]["running"], view["load"]["total"]) == (3, 18)
        shown = [
            (one["status"], one["tokens_in_flight"], one["load"]["running"])
            for one in view["engines"]
        ]
        assert shown == [("ready", 40, 1), ("dead", 0, 2)]


async def test_events_are_taken_in_only_while_somebody_looks(engine, metrics):
    page = Page(ServerOptions(), metrics)
    app = create_app(engine, metrics=metrics, page=page)
    step = StepEvent(time=1.0, duration=0.1, num_tokens=1)
    metrics.toolkit_event(step)
    assert metrics.tap is None and page.watch.num_onlookers == 0
    async with looking(app) as first:
        await first.next("view")
        async with looking(app) as second:
            await second.next("view")
            assert metrics.tap is not None and page.watch.num_onlookers == 2
        assert metrics.tap is not None
    metrics.toolkit_event(step)
    assert metrics.tap is None and page.watch.num_onlookers == 0 and not page.watch._events


async def test_onlookers_get_the_same_views(engine, metrics, monkeypatch):
    made = []
    view = Watch._made
    monkeypatch.setattr(Watch, "_made", lambda *arguments: made.append(1) or view(*arguments))
    monkeypatch.setattr(watch_module, "PERIOD", 60.0)
    app = app_of(engine, metrics)
    async with looking(app) as first, looking(app) as second:
        assert (await first.next("view"))["time"] == (await second.next("view"))["time"]
    assert len(made) == 1


async def test_onlookers_are_few(engine, metrics, monkeypatch):
    monkeypatch.setattr(page_module, "_MOST_ONLOOKERS", 1)
    app = app_of(engine, metrics)
    async with looking(app) as first:
        await first.next("view")
        async with looking(app) as second:
            assert (await second.next("view"))["error"][
                "code"
            ] == "rate_limit_exceeded" and second.status == 429
    async with looking(app) as third:
        assert await third.next("view") and third.status == 200


async def test_onlookers_who_come_at_the_same_time_are_few(engine, metrics, monkeypatch):
    monkeypatch.setattr(page_module, "_MOST_ONLOOKERS", 2)
    page = Page(ServerOptions(), metrics)
    streams = [page._events(Readiness(engine), None) for _ in range(6)]
    found = await asyncio.gather(*map(anext, streams), return_exceptions=True)
    assert [type(one).__name__ for one in found] == ["list"] * 2 + ["ApiError"] * 4
    assert page.watch.num_onlookers == 2
    for stream in streams:
        await stream.aclose()
    assert page.watch.num_onlookers == 0


async def test_the_stream_ends_with_the_server(engine, metrics):
    readiness = Readiness(engine)
    async with looking(app_of(engine, metrics, readiness)) as onlooker:
        await onlooker.next("view")
        readiness.draining = True
        while await onlooker.next("view"):
            pass
    assert metrics.tap is None


async def test_while_the_engine_is_made(engine, metrics, client_of, make_engine):
    engine.status = "starting"
    readiness = Readiness(engine)
    options = ServerOptions()
    app = create_early_app(options, metrics, readiness, Page(options, metrics))
    async with client_of(app) as client:
        assert (await client.get("/")).status_code == 200 and (
            await client.get("/v1/models")
        ).status_code == 503
    async with looking(app) as onlooker:
        assert (await onlooker.next("server"))["model"] is None
        assert (await onlooker.next("view"))["status"] == "starting"
        # Its place is taken: the page asks again, and hears of the model.
        readiness.engine = make_engine()
        while await onlooker.next("view"):
            pass
    # A request that was already on its way hears nothing of an engine without a model.
    async with looking(app) as onlooker:
        assert not await onlooker.next("server")


@pytest.mark.parametrize("in_file", [True, False])
async def test_strangers_see_no_requests_of_each_other(engine, metrics, tmp_path, in_file):
    file = tmp_path / "keys.yaml"
    file.write_text("keys:\n  - {name: alice, key: a-key}\n  - {name: bob, key: b-key}\n")
    options = (
        ServerOptions(api_keys_file=str(file))
        if in_file
        else ServerOptions(api_key=["a-key", "b-key"])
    )
    page = Page(options, metrics)
    page.log.handle(record("toolkit_lm.engine", "a line"))
    async with looking(
        create_app(engine, options, metrics=metrics, page=page), "a-key"
    ) as onlooker:
        await onlooker.next("server")
        event = RequestEvent(
            kind="queued", request_id="of-bob", time=1.0, arrival_time=1.0, num_prompt_tokens=3
        )
        metrics.toolkit_event(event)
        for _ in range(3):
            news = await onlooker.next("view")
            assert news["requests"] is None
    assert page.watch._requests == {}


def test_what_is_kept_of_requests_and_steps_is_bounded(engine, metrics, monkeypatch):
    monkeypatch.setattr(watch_module, "_MOST_REQUESTS", 50)
    watch = Watch(metrics)
    with watch.looking():
        for number in range(30_000):
            metrics.tap(
                RequestEvent(
                    kind="queued",
                    request_id=str(number),
                    time=1.0,
                    arrival_time=1.0,
                    num_prompt_tokens=3,
                )
            )
        assert len(watch._events) == 20_000
        view = watch.view(engine)
        assert len(watch._requests) == 50 and len(view["requests"]) == 40
        for _ in range(300):
            metrics.tap(StepEvent(time=1.0, duration=0.1, num_tokens=1))
        time.sleep(0.02)
        view = watch.view(engine)
        assert view["num_steps"] == 300 and len(view["steps"]) == 120
        engine.num_restarts += 1
        time.sleep(0.02)
        assert watch.view(engine)["requests"] == []


# The log


def record(
    name: str, text: str, *arguments: object, level: int = logging.INFO
) -> logging.LogRecord:
    return logging.LogRecord(name, level, __file__, 1, text, arguments, None)


async def test_the_log(engine, metrics):
    page = Page(ServerOptions(api_key=KEY), metrics)
    page.log.handle(record("toolkit_lm_server.errors", "before"))
    app = create_app(engine, ServerOptions(api_key=KEY), metrics=metrics, page=page)
    async with looking(app, KEY) as onlooker:
        [first] = (await onlooker.next("log"))["lines"]
        assert (first["level"], first["text"]) == ("info", "before")
        page.log.handle(
            record("uvicorn.error", f"given %s, {KEY}", KEY.upper(), level=logging.WARNING)
        )
        [second] = (await onlooker.next("log"))["lines"]
        assert (second["level"], second["text"]) == ("warning", "given ***, ***")


def test_what_is_kept_of_the_log():
    tail = LogTail([KEY, ""])
    with tail.attached():
        logging.getLogger("toolkit_lm_server.access").warning("GET /a?key=b")
        logging.getLogger("uvicorn.access").warning("GET /a?key=b")
        logging.getLogger("somebody").warning("another library's")
        logging.getLogger("toolkit_lm.engine").debug("too small a thing")
        logging.getLogger("toolkit_lm.engine").warning("a\r\nb\x1b[2J\u2028c %s", "x" * 10_000)
        try:
            raise ValueError(KEY)
        except ValueError:
            logging.getLogger("toolkit_lm.engine").exception("it failed")
        for number in range(300):
            logging.getLogger("toolkit_lm_cpu").warning("line %d", number)
    logging.getLogger("toolkit_lm_cpu").warning("after")
    lines = tail.since(0)
    assert (
        len(lines) == 200
        and lines[-1].text == "line 299"
        and [line.text for line in tail.since(lines[-2].number)] == ["line 299"]
    )
    fresh = LogTail([KEY])
    fresh.handle(record("toolkit_lm", "a\r\nb\x1b[2J\u2028c %s", "x" * 10_000))
    fresh.handle(record("toolkit_lm", "%d", "no number"))
    [line] = fresh.since(0)
    assert (
        len(line.text) == 500 and line.text.isprintable() and line.text.startswith("a  b [2J c xxx")
    )
