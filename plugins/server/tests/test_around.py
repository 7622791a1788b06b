"""CORS, and middleware of operators."""

from __future__ import annotations

import asyncio
import sys

import httpx
import pytest
from toolkit_lm.errors import ConfigError
from toolkit_lm_server.app import create_app
from toolkit_lm_server.around import load_middleware, wrapped
from toolkit_lm_server.lifecycle import Lifecycle
from toolkit_lm_server.listening import bind
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.request_log import RequestLog
from toolkit_lm_server.threads import in_thread

pytestmark = pytest.mark.anyio
PAGE = "https://page.example"
MODULE = """
from starlette.responses import PlainTextResponse

class Marked:
    def __init__(self, app):
        self.app = app
    async def __call__(self, scope, receive, send):
        async def marked(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-order", b"class")]
            await send(message)
        await self.app(scope, receive, marked)

async def refuse(request, call_next):
    if request.url.path == "/forbidden":
        return PlainTextResponse("no", 418)
    answer = await call_next(request)
    answer.headers.append("x-order", "function")
    return answer

async def broken(request, call_next):
    raise RuntimeError("secret")

class Wrong:
    def __init__(self, app):
        raise ValueError("no settings")

class Empty:
    def __new__(cls, app):
        return None

number = 5
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "of_operators.py").write_text(MODULE)
    (tmp_path / "of_operators_broken.py").write_text("1 / 0")
    (tmp_path / "of_operators_lacking.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    yield "of_operators"
    for name in ("of_operators", "of_operators_broken", "of_operators_lacking"):
        sys.modules.pop(name, None)


@pytest.fixture
def around(engine, client_of):
    """around(**options): a client of the engine's app with what the options put around it."""

    def make(**options):
        made = ServerOptions(**options)
        return client_of(RequestLog(wrapped(create_app(engine, made), made), Metrics()))

    return make


# CORS


async def test_without_origins_no_page_of_others_is_answered(around):
    async with around() as client:
        response = await client.get("/v1/models", headers={"origin": PAGE})
        assert not [name for name in response.headers if name.startswith("access-control")]
        assert (
            await client.options(
                "/v1/models", headers={"origin": PAGE, "access-control-request-method": "GET"}
            )
        ).status_code == 405


async def test_pages_of_allowed_origins(around):
    async with around(allowed_origins=[PAGE], api_key="secret", allow_credentials=True) as client:
        asked = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, content-type",
        }
        # A browser asks without the key.
        preflight = await client.options("/v1/completions", headers={"origin": PAGE, **asked})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        assert preflight.headers["access-control-allow-credentials"] == "true"
        refused = await client.get("/v1/models", headers={"origin": PAGE})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)
        headers = {"origin": PAGE, "authorization": "Bearer secret"}
        answer = await client.get("/v1/models", headers=headers)
        assert (
            answer.status_code,
            "x-request-id" in answer.headers["access-control-expose-headers"],
        ) == (200, True)
        other = await client.get(
            "/v1/models", headers={**headers, "origin": "https://evil.example"}
        )
        assert "access-control-allow-origin" not in other.headers
        assert (
            await client.options("/v1/models", headers={"origin": "https://evil.example", **asked})
        ).status_code == 400


async def test_methods_and_headers_can_be_fewer(around):
    async with around(
        allowed_origins=["*"], allowed_methods=["GET"], allowed_headers=["x-mine"]
    ) as client:
        headers = {"origin": PAGE, "access-control-request-method": "POST"}
        assert (await client.options("/v1/completions", headers=headers)).status_code == 400
        headers = {
            "origin": PAGE,
            "access-control-request-method": "GET",
            "access-control-request-headers": "x-other",
        }
        assert (await client.options("/v1/models", headers=headers)).status_code == 400
        headers["access-control-request-headers"] = "x-mine"
        assert (await client.options("/v1/models", headers=headers)).headers[
            "access-control-allow-origin"
        ] == "*"


def test_any_page_with_credentials_is_refused():
    with pytest.raises(ConfigError, match="allow_credentials"):
        ServerOptions(allowed_origins=["*"], allow_credentials=True)


# Middleware


async def test_middleware_in_its_order(around, module):
    async with around(middleware=[f"{module}:Marked", f"{module}.refuse"]) as client:
        answer = await client.get("/version")
        assert (answer.status_code, answer.headers.get_list("x-order")) == (
            200,
            ["function", "class"],
        )
        answer = await client.get("/forbidden")
        assert (answer.status_code, answer.headers.get_list("x-order")) == (418, ["class"])


async def test_streams_pass_through(around, module):
    async with around(middleware=[f"{module}:Marked", f"{module}:refuse"]) as client:
        answer = await client.post("/v1/completions", json={"prompt": "abc", "stream": True})
        assert answer.text.endswith("data: [DONE]\n\n") and answer.text.count("data: ") == 4


async def test_middleware_that_fails_is_an_error_of_the_server(around, module):
    async with around(middleware=[f"{module}:broken"]) as client:
        answer = await client.get("/version")
        assert (answer.status_code, answer.json()["error"]["code"], "secret" in answer.text) == (
            500,
            "internal_error",
            False,
        )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("of_operators", "write module:Class"),
        (":Marked", "write module:Class"),
        ("of_operators:Nothing", "has no 'Nothing'"),
        ("of_nobody:Marked", "there is no module 'of_nobody'. PYTHONPATH"),
        ("of_operators_lacking:Marked", "there is no module 'no_such_package'.$"),
        ("of_operators_broken:Marked", "cannot be imported: ZeroDivisionError"),
        ("of_operators:number", "neither a class nor a function"),
    ],
)
def test_what_is_no_middleware(module, name, message):
    with pytest.raises(ConfigError, match=message):
        load_middleware([name])


@pytest.mark.parametrize(
    ("name", "message"),
    [("Wrong", "cannot be made: ValueError: no settings"), ("Empty", "makes no ASGI app")],
)
def test_middleware_that_cannot_be_made(module, name, message, engine):
    with pytest.raises(ConfigError, match=message):
        wrapped(create_app(engine), ServerOptions(middleware=[f"{module}:{name}"]))


async def test_a_server_has_them(module, make_engine):
    """They are there from the first connection on."""
    engine = make_engine()
    stop = asyncio.Event()
    engine.close = lambda: None
    engine.wait_ready = stop.wait

    def make_app(engine, metrics, readiness, keys):
        return create_app(engine, options, metrics=metrics, readiness=readiness, keys=keys)

    options = ServerOptions(
        middleware=[f"{module}:Marked"], allowed_origins=[PAGE], log_level="critical", port=0
    )
    with bind("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        one = Lifecycle(in_thread(lambda: engine), make_app, options, Metrics(), listener)
        running = asyncio.create_task(one.run())
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"{url}/version", headers={"origin": PAGE})
        one._stopped = True
        await asyncio.wait([running])
    assert (answer.headers["x-order"], answer.headers["access-control-allow-origin"]) == (
        "class",
        PAGE,
    )
