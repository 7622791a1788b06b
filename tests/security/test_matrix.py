"""Attacks on each route: the answer is an error of the documented kind, in time, whatever was sent.

The routes are the app's own, over small engines. A route that is new fails `test_each_route_has_a_row` until it has a row.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.testclient import TestClient
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm_server.app import create_app, create_router
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions

HI = {"messages": [{"role": "user", "content": "hi"}]}
GENERATED = {
    "/v1/chat/completions": {**HI, "max_tokens": 2},
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/invocations": {"prompt": "a", "max_tokens": 2},
    "/infill": {"prompt": "a", "n_predict": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}
POOLED = {
    "/v1/embeddings": {"input": "a"},
    "/v1/embed": {"texts": ["a"]},
    "/v2/embed": {"texts": ["a"]},
    "/pooling": {"input": "a", "task": "embed"},
    "/classify": {"input": "a"},
    "/score": {"queries": "a", "documents": ["b"]},
    "/v1/score": {"queries": "a", "documents": ["b"]},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
}
BODIES = {**GENERATED, **POOLED}
"""Of each route that takes a body, a good one."""
OTHERS = {("GET", path) for path in ("/v1/models", "/v1/models/{model:path}", "/load", "/version", "/metrics")} | {
    ("POST", "/reset_prefix_cache")
}
OPEN = {("GET", "/live"), ("GET", "/health"), ("GET", "/ready"), ("GET", "/ping"), ("POST", "/ping")}
"""Routes that look at nothing of a request."""
NOT_SERVED = ("/classify",)
"""What neither engine does: its good body is refused too."""
MAPPINGS = ("chat_template_kwargs", "guided_json", "logit_bias", "mm_processor_kwargs", "reasoning", "stream_options", "text")
JSON = {"content-type": "application/json"}
SMALL = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "engine_process": False}
KEY = "secret"
MOST_SECONDS = 1
"""Of computing, for a request."""


class Server:
    """An app over each engine, asked as one."""

    def __init__(self, engines: dict[str, AsyncLLM], **options) -> None:
        self.apps = {name: create_app(engine, made(**options), metrics=Metrics()) for name, engine in engines.items()}
        self._router = create_router(engines["generate"], made(**options), metrics=Metrics())
        self.clients = {name: TestClient(app, raise_server_exceptions=False) for name, app in self.apps.items()}

    def app(self, path: str) -> FastAPI:
        return self.apps["pooling" if path in POOLED else "generate"]

    def routes(self) -> set[tuple[str, str]]:
        return {(method, route.path) for route in self._router.routes if isinstance(route, APIRoute) for method in route.methods or ()}

    def send(self, path: str, method: str = "POST", **sent) -> httpx.Response:
        """The answer. It comes in time, and is a documented one, in the shape of OpenAI's errors unless it is a success."""
        response, seconds = self._send(path, method, sent)
        if seconds >= MOST_SECONDS:
            # What the request costs, it costs again; a garbage collection comes once.
            response, seconds = self._send(path, method, sent)
        where = f"{method} {path}: {response.status_code} {response.text[:300]}"
        assert seconds < MOST_SECONDS, f"{seconds:.2f} s: {where}"
        assert response.status_code < 500, where
        described = self.app(path).openapi()["paths"][path.replace(":path", "")][method.lower()]["responses"]
        assert str(response.status_code) in described, where
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}, where
            assert len(response.content) < 3000, where
        return response

    def _send(self, path: str, method: str, sent: dict) -> tuple[httpx.Response, float]:
        """The answer, and what this process computed for it, in seconds: the machine may have other work."""
        client = self.clients["pooling" if path in POOLED else "generate"]
        start = time.process_time()
        response = client.request(method, path.replace("{model:path}", "no/such"), **sent)
        return response, time.process_time() - start


def made(**options) -> ServerOptions:
    return ServerOptions(admin_routes=True, max_body_size="2MiB", **options)


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, AsyncLLM]]:
    configs = {"generate": VllmConfig.make(model="tiny", **SMALL), "pooling": VllmConfig.make(model="tiny", convert="embed", **SMALL)}
    both = {name: AsyncLLM(config) for name, config in configs.items()}
    yield both
    for engine in both.values():
        engine.close()


@pytest.fixture(scope="module")
def server(engines) -> Iterator[Server]:
    yield from entered(Server(engines))


@pytest.fixture(scope="module")
def locked(engines) -> Iterator[Server]:
    """The same with an API key."""
    yield from entered(Server(engines, api_key=KEY))


def entered(server: Server) -> Iterator[Server]:
    """With one event loop for all requests."""
    with server.clients["generate"], server.clients["pooling"]:
        yield server


def nested(depth: int, before: str = "[", after: str = "]") -> str:
    return before * depth + "1" + after * depth


def with_text(path: str, field: str, text: str) -> bytes:
    """The good body and a field whose JSON is `text`."""
    return (json.dumps(BODIES[path])[:-1] + f", {json.dumps(field)}: {text}}}").encode()


def first(path: str) -> str:
    return next(iter(BODIES[path]))


DEPTHS = (90, 200, 500, 970, 5000, 300_000)
ATTACKS: dict[str, Callable[[str], bytes]] = {
    "nothing": lambda path: b"",
    "blank": lambda path: b" \n",
    "no object": lambda path: b"[1]",
    "null": lambda path: b"null",
    "broken": lambda path: json.dumps(BODIES[path]).encode()[:-1],
    "empty": lambda path: b"{}",
    **{f"deep lists, {depth}": lambda path, depth=depth: with_text(path, first(path), nested(depth)) for depth in DEPTHS},
    **{f"deep objects, {depth}": lambda path, depth=depth: with_text(path, first(path), nested(depth, '{"a":', "}")) for depth in DEPTHS},
    "deep and open": lambda path: with_text(path, first(path), "[" * 10**6),
    "deep in a text": lambda path: with_text(path, "unknown", json.dumps("[{" * 10**5)),
    "wide": lambda path: json.dumps({**BODIES[path], **{f"x{number}": 1 for number in range(100_000)}}).encode(),
    "wide list": lambda path: with_text(path, first(path), json.dumps([None] * 300_000)),
    "wide object": lambda path: with_text(path, first(path), json.dumps({str(number): 1 for number in range(100_000)})),
    "the same name": lambda path: ("{" + '"unknown": 1, ' * 100_000 + '"unknown": 1}').encode(),
    "huge integer": lambda path: with_text(path, first(path), "9" * 4000),
    "endless integer": lambda path: with_text(path, first(path), "9" * 10**6),
    "huge number": lambda path: with_text(path, first(path), "1e999"),
    "NaN": lambda path: with_text(path, first(path), "NaN"),
    "Infinity": lambda path: with_text(path, first(path), "-Infinity"),
    "not UTF-8": lambda path: b'{"\xff": 1}',
    "UTF-16": lambda path: json.dumps(BODIES[path]).encode("utf-16"),
    "a surrogate": lambda path: with_text(path, "unknown", r'"\ud800"'),
    "unknown field": lambda path: with_text(path, "unknown", "1"),
    "unknown field with a long name": lambda path: with_text(path, "x" * 10**6, "1"),
    "model with a long name": lambda path: with_text(path, "model", json.dumps("x" * 10**6)),
}


def test_each_route_has_a_row(server):
    assert server.routes() == {("POST", path) for path in BODIES} | OTHERS | OPEN


@pytest.mark.parametrize("path", BODIES)
def test_good_bodies_are_good(server, path):
    """Else what is refused below would say nothing."""
    assert server.send(path, json=BODIES[path]).status_code == (400 if path in NOT_SERVED else 200)


@pytest.mark.parametrize("attack", ATTACKS)
def test_bad_bodies(server, attack):
    for path in BODIES:
        response = server.send(path, content=ATTACKS[attack](path), headers=JSON)
        assert response.status_code == (404 if attack == "model with a long name" else 400), (path, response.text[:300])


@pytest.mark.parametrize("path", BODIES)
def test_wrong_types(server, path):
    """Of each field that the API's description has."""
    schema = server.app(path).openapi()
    name = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    for field, described in schema["components"]["schemas"][name]["properties"].items():
        if set(described) == {"description"}:
            # Whatever it is, it has no effect.
            continue
        wrong = 5 if field in MAPPINGS else {"a": [None]}
        assert server.send(path, json={**BODIES[path], field: wrong}).status_code in (400, 404), field


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "é", ";" * 5000]
)
def test_wrong_content_types(server, content_type):
    headers = {} if content_type is None else {"content-type": content_type.encode("latin-1")}
    for path in BODIES:
        assert server.send(path, content=json.dumps(BODIES[path]).encode(), headers=headers).status_code == 400


@pytest.mark.parametrize("encoding", ["gzip", "deflate, gzip", "br", "x" * 1000])
def test_compressed_bodies(server, encoding):
    for method, path in server.routes() - OPEN:
        response = server.send(path, method, content=b"\x1f\x8b", headers={**JSON, "content-encoding": encoding})
        assert response.status_code == 415


def test_bodies_that_are_too_large(server):
    for method, path in server.routes() - OPEN:
        assert server.send(path, method, content=b"x" * (2**21 + 1), headers=JSON).status_code == 413


KEYS = [None, b"", b"Bearer", b"Bearer wrong", b"Bearer s\xe9cret", b"Bearer \xff\xfe", b"Basic secret", b"Bearer " + b"x" * 10_000]


@pytest.mark.parametrize("header", KEYS)
def test_missing_and_wrong_keys(locked, header):
    headers = {} if header is None else {"authorization": header}
    for method, path in locked.routes() - OPEN:
        assert locked.send(path, method, content=b"[" * 1000, headers={**JSON, **headers}).status_code == 401
    for method, path in OPEN:
        assert locked.send(path, method, headers=headers).status_code == 200
    assert locked.send("/version", "GET", headers={"authorization": f"Bearer {KEY}"}).status_code == 200
