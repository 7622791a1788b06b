"""Attacks on each route: the answer is an error of the documented kind, in time, whatever was sent.

The routes are the app's own, over small engines. A route that is new fails
`test_each_route_has_a_row` until it has a row.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from attacks import ATTACKS, BODIES, GENERATED, POOLED
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from safetensors.torch import save_file
from starlette.testclient import TestClient
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm_server.app import create_app, create_router
from toolkit_lm_server.field_kinds import kind_schema
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.plugin_routes import SHIPPED

ONE = "/v1/responses/{response_id}"
TALK = "/v1/conversations/{conversation_id}"
CHAT = "/v1/chat/completions"
OTHERS = {
    *(
        ("GET", path)
        for path in (
            "/v1/models",
            "/v1/models/{model:path}",
            "/load",
            "/version",
            "/metrics",
            "/tokenizer_info",
            "/props",
            "/slots",
            "/get_model_info",
            "/model_info",
            "/health_generate",
            "/get_server_info",
            "/server_info",
            "/info",
            "/kv_event_sources",
            *("/v2", "/v2/health/live", "/v2/health/ready"),
            *("/v2/models/{name:model_name}", "/v2/models/{name:path}/ready"),
            ONE,
            f"{ONE}/input_items",
        )
    ),
    *(("GET", path) for path in ("/api/tags", "/api/ps", "/api/version")),
    ("DELETE", ONE),
    ("GET", CHAT),
    ("GET", f"{CHAT}/{{completion_id}}/messages"),
    *((method, f"{CHAT}/{{completion_id}}") for method in ("GET", "POST", "DELETE")),
    *(
        (method, path)
        for path in (TALK, f"{TALK}/items", f"{TALK}/items/{{item_id}}")
        for method in ("GET", "POST", "DELETE")
        if (method, path)
        not in (("POST", f"{TALK}/items/{{item_id}}"), ("DELETE", f"{TALK}/items"))
    ),
    ("POST", f"{ONE}/cancel"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/flush_cache"),
    ("POST", "/props"),
    ("POST", "/slots/{slot}"),
    *(
        ("GET", f"/{name}")
        for name in ("is_paused", "is_sleeping", "weight_info", "get_world_size")
    ),
    *(
        ("POST", f"/{name}")
        for name in (
            "pause",
            "resume",
            "sleep",
            "wake_up",
            "start_weight_update",
            "init_weight_transfer_engine",
            "update_weights",
            "finish_weight_update",
            "update_weight_version",
            "collective_rpc",
        )
    ),
}
OPEN = {
    ("GET", "/live"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/ping"),
    ("POST", "/ping"),
}
"""Routes that look at nothing of a request."""
ADAPTED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Routes whose bodies may name an adapter beside the model."""
NOT_SERVED = {
    "/classify": 400,
    "/v1/moderations": 400,
    "/infill": 400,
    "/predict": 424,
    "/embed_sparse": 424,
}
"""Statuses of routes that neither engine serves: their good body is refused too."""
LLAMA_CPP = {
    *("/completion", "/apply-template", "/tokenize", "/detokenize", "/props", "/slots"),
    *("/slots/{slot}", "/embedding", "/embeddings", "/reranking", "/v1/reranking"),
}
"""Routes with llama.cpp's errors."""
TEI = {
    *("/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity", "/rerank", "/info"),
    "/decode",
}
"""Routes with Text Embeddings Inference's errors."""
NOTHING_MISSING = ("/api/chat", "/api/generate", "/api/show", "/v1/conversations")
"""Without a prompt, Ollama loads the model, and a conversation may have no items: an empty body is
good."""
NO_MODEL = ("/v1/conversations",)
"""Routes whose bodies name no model."""
UNCOUNTED = (
    "/tokenize",
    "/detokenize",
    "/decode",
    "/apply-template",
    "/v1/messages/count_tokens",
    "/api/show",
    *NO_MODEL,
)
"""Routes that ask nothing of an engine."""
UNKNOWN = ("deep in a text", "a surrogate", "unknown field")
"""Attacks by fields that a lenient server ignores."""
JSON = {"content-type": "application/json"}
SMALL = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "engine_process": False}
KEY = "secret"
MOST_SECONDS = 1
"""Seconds of computing per request."""


class Server:
    """An app over each engine, asked as one."""

    def __init__(self, engines: dict[str, AsyncLLM], **options) -> None:
        self.apps = {
            name: create_app(engine, made(**options), metrics=Metrics())
            for name, engine in engines.items()
        }
        self._router = create_router(engines["generate"], made(**options), metrics=Metrics())
        self.clients = {
            name: TestClient(app, raise_server_exceptions=False) for name, app in self.apps.items()
        }

    def app(self, path: str) -> FastAPI:
        return self.apps["pooling" if path in POOLED else "generate"]

    def routes(self) -> set[tuple[str, str]]:
        return {
            (method, route.path)
            for route in self._router.routes
            if isinstance(route, APIRoute)
            for method in route.methods or ()
        }

    def send(self, path: str, method: str = "POST", **sent) -> httpx.Response:
        """The answer. It comes in time, and is a documented one, in the shape of the API's errors
        unless it is a success."""
        response, seconds = self.send_once(path, method, **sent)
        if seconds >= MOST_SECONDS:
            # The request's cost occurs again; a garbage collection occurs only once.
            response, seconds = self.send_once(path, method, **sent)
        where = f"{method} {path}: {response.status_code} {response.text[:300]}"
        assert seconds < MOST_SECONDS, f"{seconds:.2f} s: {where}"
        assert response.status_code < 500, where
        described = self.app(path).openapi()["paths"][re.sub(r":\w+\}", "}", path)][method.lower()][
            "responses"
        ]
        assert str(response.status_code) in described, where
        if response.status_code >= 400:
            check_error(path, response.json(), where)
            assert len(response.content) < 3000, where
        return response

    def send_once(self, path: str, method: str = "POST", **sent) -> tuple[httpx.Response, float]:
        """The answer, and what this process computed for it, in seconds: the machine may have other
        work."""
        client = self.clients["pooling" if path in POOLED else "generate"]
        start = time.process_time()
        path = re.sub(r"\{name:\w+\}", "tiny", path.replace("{model:path}", "no/such"))
        response = client.request(method, path, **sent)
        return response, time.process_time() - start


def check_error(path: str, body: dict, where: str) -> None:
    """In the shape that the API has which the route belongs to."""
    if path.startswith("/api/"):
        assert set(body) == {"error"} and isinstance(body["error"], str), where
    elif path == "/v2/chat":
        assert set(body) == {"message"}, where
    elif path.startswith("/v1/messages"):
        assert (set(body), body["type"], set(body["error"])) == (
            {"type", "error"},
            "error",
            {"type", "message"},
        ), where
    elif path in TEI:
        assert set(body) == {"error", "error_type"}, where
    elif path == "/v2" or path.startswith(("/v2/health", "/v2/models")):
        assert set(body) == {"error"} and isinstance(body["error"], str), where
    elif path in LLAMA_CPP:
        assert set(body["error"]) == {"message", "type", "param", "code"}, where
        assert isinstance(body["error"]["code"], int), where
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}, where


def made(**options) -> ServerOptions:
    return ServerOptions(
        admin_routes=True,
        tokenizer_info=True,
        max_stored_responses=4,
        routes=(*SHIPPED, "kserve", "llama_cpp", "moderations", "sglang", "tei", "vllm_names"),
        **{"max_body_size": "2MiB", "strict_fields": True, **options},
    )


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, AsyncLLM]]:
    configs = {
        "generate": VllmConfig.make(model="tiny", **SMALL),
        "pooling": VllmConfig.make(model="tiny", convert="embed", **SMALL),
    }
    both = {name: AsyncLLM(config) for name, config in configs.items()}
    yield both
    for engine in both.values():
        engine.close()


@pytest.fixture(scope="module")
def server(engines) -> Iterator[Server]:
    yield from entered(Server(engines))


@pytest.fixture(scope="module")
def lenient(engines) -> Iterator[Server]:
    """The same as it is by default: unknown fields are ignored."""
    yield from entered(Server(engines, strict_fields=False))


@pytest.fixture(scope="module")
def locked(engines) -> Iterator[Server]:
    """The same with an API key."""
    yield from entered(Server(engines, api_key=KEY))


@pytest.fixture(scope="module")
def counted(engines, tmp_path_factory) -> Iterator[Server]:
    """The same with a key for each route, which a token a minute is for."""
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    file.write_text(
        json.dumps(
            {"keys": [{"name": path, "key": path, "tokens_per_minute": 1} for path in BODIES]}
        )
    )
    yield from entered(Server(engines, api_keys_file=str(file)))


@pytest.fixture(scope="module")
def stingy(engines) -> Iterator[Server]:
    """The same where a request may cost hardly anything."""
    yield from entered(Server(engines, max_request_cost="4KiB"))


def entered(server: Server) -> Iterator[Server]:
    """With one event loop for all requests."""
    with server.clients["generate"], server.clients["pooling"]:
        yield server


def test_each_route_has_a_row(server):
    assert server.routes() == {("POST", path) for path in BODIES} | OTHERS | OPEN


@pytest.mark.parametrize("path", BODIES)
def test_good_bodies_are_good(server, path):
    """Else what is refused below would say nothing."""
    assert server.send(path, json=BODIES[path]).status_code == NOT_SERVED.get(path, 200)


HEAVY = ("wide", "wide list", "wide object")
"""Attacks that take a second per route. Each route has one of them, and at night all."""


@pytest.mark.parametrize(
    ("attack", "paths"),
    [
        (one, list(BODIES)[HEAVY.index(one) :: len(HEAVY)] if one in HEAVY else list(BODIES))
        for one in ATTACKS
    ]
    + [pytest.param(one, list(BODIES), marks=pytest.mark.nightly) for one in HEAVY],
)
def test_bad_bodies(server, attack, paths):
    for path in paths:
        response = server.send(path, content=ATTACKS[attack](path), headers=JSON)
        names_model = attack == "model with a long name" and path not in NO_MODEL
        wanted = 404 if names_model else 400
        if attack == "empty" and path in NOTHING_MISSING:
            wanted = 200
        assert response.status_code == wanted, (path, response.text[:300])


@pytest.mark.parametrize("attack", UNKNOWN)
def test_fields_that_are_ignored(lenient, attack):
    for path in BODIES:
        response = lenient.send(path, content=ATTACKS[attack](path), headers=JSON)
        assert response.status_code == NOT_SERVED.get(path, 200), (path, response.text[:300])
        assert path in NOT_SERVED or response.headers["x-ignored-fields"] == "unknown"


@pytest.mark.parametrize("path", BODIES)
def test_wrong_types(server, path):
    """Each field in the API's description is given wrong types."""
    schema = server.app(path).openapi()
    described_path = schema["paths"][re.sub(r":\w+\}", "}", path)]
    body = described_path["post"]["requestBody"]["content"]["application/json"]["schema"]
    if "$ref" not in body:
        # Any mapping: another route reads it.
        assert path == "/invocations"
        return
    for field, described in schema["components"]["schemas"][body["$ref"].rpartition("/")[2]][
        "properties"
    ].items():
        bare = {
            name: part for name, part in described.items() if name not in ("description", "title")
        }
        if bare == kind_schema(field):
            # Whatever it is, it has no effect.
            continue
        kinds = [
            one.get("type", "object" if "$ref" in one else None)
            for one in (described, *described.get("anyOf", ()))
        ]
        wrong = 5 if "object" in kinds else {"a": [None]}
        assert server.send(path, json={**BODIES[path], field: wrong}).status_code in (400, 404), (
            field
        )


@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "é",
        ";" * 5000,
    ],
)
def test_wrong_content_types(server, content_type):
    # Ollama's routes ask for none, unless a page of a browser sends the body.
    given = {} if content_type is None else {"content-type": content_type.encode("latin-1")}
    headers = {"origin": "http://elsewhere", **given}
    for path in BODIES:
        assert (
            server.send(
                path, content=json.dumps(BODIES[path]).encode(), headers=headers
            ).status_code
            == 400
        )


@pytest.mark.parametrize("encoding", ["gzip", "deflate, gzip", "br", "x" * 1000])
def test_compressed_bodies(server, encoding):
    for method, path in server.routes() - OPEN:
        response = server.send(
            path, method, content=b"\x1f\x8b", headers={**JSON, "content-encoding": encoding}
        )
        assert response.status_code == 415


def test_bodies_that_are_too_large(server):
    for method, path in server.routes() - OPEN:
        assert (
            server.send(path, method, content=b"x" * (2**21 + 1), headers=JSON).status_code == 413
        )


KEYS = [
    None,
    b"",
    b"Bearer",
    b"Bearer wrong",
    b"Bearer s\xe9cret",
    b"Bearer \xff\xfe",
    b"Basic secret",
    b"Bearer " + b"x" * 10_000,
]


@pytest.mark.parametrize("header", KEYS)
def test_missing_and_wrong_keys(locked, header):
    headers = {} if header is None else {"authorization": header}
    for method, path in locked.routes() - OPEN:
        assert (
            locked.send(path, method, content=b"[" * 1000, headers={**JSON, **headers}).status_code
            == 401
        )
    for method, path in OPEN:
        assert locked.send(path, method, headers=headers).status_code == 200
    assert (
        locked.send("/version", "GET", headers={"authorization": f"Bearer {KEY}"}).status_code
        == 200
    )


def test_keys_of_anthropics_clients(locked):
    """Their header is another way to send the key, and not a way around it."""
    for method, path in locked.routes() - OPEN:
        for headers in (
            {"x-api-key": "wrong"},
            {"x-api-key": KEY, "authorization": "Bearer wrong"},
            {"x-api-key": ""},
        ):
            assert (
                locked.send(path, method, content=b"{}", headers={**JSON, **headers}).status_code
                == 401
            )
    assert (
        locked.send(
            "/v1/messages", json=BODIES["/v1/messages"], headers={"x-api-key": KEY}
        ).status_code
        == 200
    )


@pytest.mark.parametrize("path", BODIES)
def test_tokens_are_counted_for_the_key(counted, path):
    """Whichever API they were asked by: the next request comes too early."""
    found = [
        counted.send_once(path, json=BODIES[path], headers={"authorization": f"Bearer {path}"})[0]
        for _ in range(2)
    ]
    if path in NOT_SERVED:
        # A vector shows that it is not sparse once it is computed.
        again = 429 if path == "/embed_sparse" else NOT_SERVED[path]
        assert [one.status_code for one in found] == [NOT_SERVED[path], again]
    else:
        assert [one.status_code for one in found] == [200, 200 if path in UNCOUNTED else 429]
        assert ("retry-after" in found[1].headers) == (path not in UNCOUNTED)


@pytest.mark.parametrize("path", BODIES)
def test_what_costs_too_much_is_refused(stingy, path):
    response = stingy.send(path, json=BODIES[path])
    free = {"/tokenize", "/detokenize", "/decode", "/api/show", *NO_MODEL}
    if path in free or (path in NOT_SERVED and path != "/embed_sparse"):
        assert response.status_code == NOT_SERVED.get(path, 200)
    else:
        assert response.status_code == 400 and "(max_request_cost)" in response.text


def test_the_first_request_makes_no_routes(engines, monkeypatch):
    """It would take about 0.2 seconds."""
    app = Server(engines).apps["generate"]
    made = []
    make = TypeAdapter.__init__
    monkeypatch.setattr(TypeAdapter, "__init__", lambda *a, **b: made.append(a) or make(*a, **b))
    with TestClient(app) as client:
        assert client.get("/health").status_code == 200
    assert not made


def save_adapter(folder: Path, config: dict[str, Any]) -> None:
    """An adapter of one layer."""
    size = config["hidden_size"]
    outputs = config["num_attention_heads"] * config.get(
        "head_dim", size // config["num_attention_heads"]
    )
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {name.format("A"): torch.ones(2, size), name.format("B"): torch.ones(outputs, 2)}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 2, "target_modules": [], "lora_alpha": 1}
    (folder / "adapter_config.json").write_text(json.dumps(fields))


@pytest.fixture(scope="module")
def tenants(engines, tmp_path_factory) -> Iterator[Server]:
    """An engine with two adapters, each of which one key may have."""
    folder = tmp_path_factory.mktemp("tenants")
    for name in ("zita", "his"):
        save_adapter(folder / "adapters" / name, engines["generate"].config.hf_config)
    keys = [{"name": name, "key": name, "adapters": [name]} for name in ("zita", "his")]
    (folder / "keys.yaml").write_text(json.dumps({"keys": keys}))
    config = VllmConfig.make(
        model="tiny",
        plugin_option={"lora": {"folder": str(folder / "adapters")}},
        **SMALL,
    )
    engine = AsyncLLM(config)
    both = {"generate": engine, "pooling": engines["pooling"]}
    yield from entered(Server(both, api_keys_file=str(folder / "keys.yaml")))
    engine.close()


def test_keys_have_no_adapters_of_others(tenants):
    """Another key's adapter is as one that there is not: used, loaded, unloaded and listed."""
    his = {"authorization": "Bearer his"}
    listed = tenants.send_once("/v1/models", "GET", headers=his)[0].json()["data"]
    assert [one["id"] for one in listed] == ["tiny", "his"]

    def ask(path: str, body: dict[str, Any]) -> tuple[int, str]:
        answer, _ = tenants.send_once(path, json=body, headers=his)
        return answer.status_code, answer.text

    asked = [
        (path, "model", body)
        for path, body in GENERATED.items()
        if path not in ("/infill", *NO_MODEL)
    ]
    asked += [
        (path, field, body)
        for path, body in GENERATED.items()
        if path in ADAPTED
        for field in ("adapter", "lora_path")
    ]
    for path, field, body in asked:
        assert ask(path, {**body, field: "his"})[0] == 200, path
        other, absent = (ask(path, {**body, field: name}) for name in ("zita", "none"))
        assert other[0] == 404 and other[1].count("zita") == 1, (path, field, other)
        assert other[1].replace("zita", "none") == absent[1], path
    load = {"lora_name": "his", "lora_path": "zita"}
    for path in ("/v1/load_lora_adapter", "/load_lora_adapter"):
        for name, folder in (("his", "zita"), ("zita", "zita"), ("zita", "his")):
            assert ask(path, {**load, "lora_name": name, "lora_path": folder})[0] == 400
    for path in ("/v1/unload_lora_adapter", "/unload_lora_adapter"):
        other, absent = (ask(path, {"lora_name": name}) for name in ("zita", "none"))
        assert other[0] == absent[0] == 404
    assert ask("/v1/completions", {"prompt": "a", "max_tokens": 2, "model": "his"})[0] == 200
    listed = tenants.send_once("/lora-adapters", "GET", headers=his)[0].json()
    assert [(one["id"], one["name"]) for one in listed] == [(0, "his")]
    for number, status in ((0, 200), (1, 404)):
        body = {"prompt": "a", "max_tokens": 2, "lora": [{"id": number, "scale": 1}]}
        assert ask("/v1/completions", body)[0] == status
    scales = tenants.send_once("/lora-adapters", json=[{"id": 0, "scale": 1}], headers=his)[0]
    assert scales.status_code == 400
    her = {"authorization": "Bearer zita"}
    body = {**GENERATED["/v1/completions"], "model": "zita"}
    assert tenants.send_once("/v1/completions", json=body, headers=her)[0].status_code == 200
    figures = tenants.send_once("/metrics", "GET", headers=his)[0].text
    assert "zita" not in figures and "lora_loads" not in figures
