"""The pool's own routes without an engine: keys, wrong bodies, descriptions, and answers that are
as described."""

from __future__ import annotations

import httpx
import pytest
from fastapi.routing import APIRoute
from toolkit_lm.config import VllmConfig
from toolkit_lm_model_pool import schemas
from toolkit_lm_model_pool.app import make_pool_app
from toolkit_lm_model_pool.entries import Entry, made_entry
from toolkit_lm_model_pool.model import PooledModel, settings_of
from toolkit_lm_model_pool.page import PoolPage
from toolkit_lm_model_pool.pool import Pool
from toolkit_lm_server.caller import CALLER, Caller
from toolkit_lm_server.health import Readiness
from toolkit_lm_server.keys import Keys
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions

OPEN = {"/live", "/health", "/ready", "/ping"}
LISTS = {
    "/v1/models": schemas.PoolList,
    "/models": schemas.PoolList,
    "/v1/models/a": schemas.PoolCard,
    "/running": schemas.RunningList,
    "/load": schemas.Load,
    "/api/tags": schemas.Tags,
    "/api/ps": schemas.RunningTags,
    "/api/version": schemas.Version,
    "/is_sleeping?model=a": schemas.Sleeping,
}
CHANGES = (
    *("/models/load", "/models/unload", "/unload", "/models/reload", "/models/sleep"),
    *("/models/wake_up", "/sleep", "/wake_up"),
)
OF_MODELS = ("/v1/chat/completions", "/v1/embeddings", "/api/chat", "/nothing")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def models(*names: str) -> list[PooledModel]:
    entries = [type(made_entry(name))(name=name, checkpoint="tiny") for name in names]
    config = VllmConfig.make(max_model_len=64, device="cpu")
    return [
        PooledModel(entry, settings_of(entry, config, ServerOptions(), 60)) for entry in entries
    ]


def is_page(path: str) -> bool:
    """Whether the path is of the page's files, which say nothing of this server."""
    return path == "/" or path.startswith("/ui/")


def made(**options):
    """A pool that loads nothing, and a client of its app."""
    server = ServerOptions(admin_routes=True, **options)
    pool = Pool(models("a", "b"), 2**33, turn=1, timeout=0)
    app = make_pool_app(
        pool, server, Metrics(), Readiness(pool), Keys.of(server), lambda: models("a", "c")
    )
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://pool")
    return pool, app, client


@pytest.mark.anyio
async def test_nothing_is_told_or_loaded_without_a_key():
    pool, app, client = made(api_key="secret")
    paths = {
        (method, route.path.replace("{model:path}", "a"))
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in route.methods
        if route.path not in OPEN and (route.path == "/ui/events" or not is_page(route.path))
    }
    assert {path for _, path in paths} == {
        *(path.partition("?")[0] for path in LISTS),
        *CHANGES,
        "/version",
        "/metrics",
        "/api/show",
        "/ui/events",
    }
    for method, path in (*paths, *(("POST", path) for path in OF_MODELS)):
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            answer = await client.request(method, path, json={"model": "a"}, headers=headers)
            assert answer.status_code == 401, (method, path)
            assert "'a'" not in answer.text
    assert all(model.since is None and model.state == "cold" for model in pool.models.values())
    # With the key, the wait begins, and is over.
    headers = {"Authorization": "Bearer secret"}
    answer = await client.post("/v1/chat/completions", json={"model": "a"}, headers=headers)
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert "secret" not in (await client.get("/v1/models", headers=headers)).text


@pytest.mark.anyio
async def test_the_page_tells_a_key_of_its_models_and_who_may_change_them():
    for admin in (True, False):
        server = ServerOptions(admin_routes=admin)
        pool = Pool(models("a", "b"), 2**33, turn=1, timeout=0)
        page = PoolPage(pool, server, Metrics())
        stream = page._events(Readiness(pool), None)
        caller = Caller()
        caller.models = ("b",)
        token = CALLER.set(caller)
        try:
            view, described = await anext(stream)
        finally:
            CALLER.reset(token)
            await stream.aclose()
        assert view["manages"] is admin and view["budget"] == 2**33
        assert [model["name"] for model in view["models"]] == ["b"]
        assert described["model"]["name"] == "b" and not described["model"]["architecture"]
    _, _, client = made(ui=False)
    assert (await client.get("/")).is_error
    _, _, client = made()
    assert "models-panel" in (await client.get("/")).text
    assert (await client.get("/ui/pool.js")).status_code == 200


@pytest.mark.anyio
async def test_a_key_sees_its_adapters(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(
        "keys: [{name: some, key: s, models: [a], adapters: ['sql*']}, {name: all, key: a}, "
        "{name: other, key: o, models: [b]}, {name: tuned, key: t, models: ['sq*']}, "
        "{name: none, key: n, models: [sql], adapters: [prose]}]"
    )
    server = ServerOptions(api_keys_file=str(path))
    entry = Entry(name="a", checkpoint="tiny", adapters={"sql": "x", "prose": "y"})
    config = VllmConfig.make(max_model_len=64, device="cpu")
    tuned = PooledModel(entry, settings_of(entry, config, server, 60))
    pool = Pool([tuned, *models("b")], 2**33, turn=1, timeout=0)
    app = make_pool_app(pool, server, Metrics(), Readiness(pool), Keys.of(server), list)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://pool") as client:
        for key, names in (
            ("s", ["a", "sql"]),
            ("a", ["a", "sql", "prose", "b"]),
            ("o", ["b"]),
            # A key that is limited to the name of an adapter.
            ("t", ["sql"]),
            ("n", []),
        ):
            headers = {"Authorization": f"Bearer {key}"}
            cards = (await client.get("/v1/models", headers=headers)).json()["data"]
            assert [card["id"] for card in cards] == names
            for name in ("a", "sql", "prose", "b"):
                card = await client.get(f"/v1/models/{name}", headers=headers)
                body = {"model": name, "prompt": "a"}
                answer = await client.post("/v1/completions", json=body, headers=headers)
                # One that may be used is waited for.
                expected = (200, 503) if name in names else (404, 404)
                assert (card.status_code, answer.status_code) == expected, (key, name)
                if name not in names:
                    assert all(f"'{name}'" not in text for text in nearest_of(answer))


def nearest_of(answer: httpx.Response) -> list[str]:
    """The names that an error offers."""
    return answer.json()["error"]["message"].split("does not exist.")[1:]


@pytest.mark.anyio
async def test_answers_are_as_described():
    _, app, client = made()
    for path, kind in LISTS.items():
        answer = await client.get(path)
        assert answer.status_code == 200, answer.text
        kind.model_validate(answer.json(), strict=True, extra="forbid")
    card = (await client.post("/api/show", json={"name": "a"})).json()
    schemas.Card.model_validate(card, strict=True, extra="forbid")
    parts = app.openapi()["components"]["schemas"]
    own = {name for name in vars(schemas) if isinstance(vars(schemas)[name], type)}
    seen = {name: part for name, part in parts.items() if name in own}
    assert len(seen) > 12
    for name, part in seen.items():
        for field, schema in part["properties"].items():
            is_body = name.endswith("Body")
            assert is_body or schema.get("description") or "$ref" in schema, (name, field)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "path", ["/models/load", "/models/unload", "/unload", "/models/sleep", "/api/show"]
)
@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b'{"model": 3}', b'{"model": ""}', b'{"model": "a", "more": 1}',
     b'{"model": "' + b"x" * 300 + b'"}', b'{"model": {"a": 1}}', b"[" * 5000],
)  # fmt: skip
async def test_wrong_bodies_are_errors_in_words(path, body):
    _, _, client = made()
    headers = {"content-type": "application/json"}
    answer = await client.post(path, content=body, headers=headers)
    if path == "/api/show" and b"more" in body:
        assert answer.status_code == 200
        return
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["message"] and len(answer.content) < 3000


@pytest.mark.anyio
async def test_operators_routes_need_the_option():
    server = ServerOptions()
    pool = Pool(models("a", "b"), 2**33, turn=1, timeout=0)
    app = make_pool_app(pool, server, Metrics(), Readiness(pool), None, lambda: models("a"))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://pool") as client:
        for path in CHANGES:
            assert (await client.post(path, json={"model": "a"})).status_code == 404
    assert [*pool.models] == ["a", "b"]


@pytest.mark.anyio
async def test_a_reload_takes_the_new_entries_in():
    pool, _, client = made()
    answer = await client.post("/models/reload")
    assert answer.json() == {"added": ["c"], "changed": [], "removed": ["b"]}
    schemas.Reloaded.model_validate(answer.json(), strict=True, extra="forbid")
    assert [*pool.models] == ["a", "c"]


@pytest.mark.anyio
async def test_a_draining_server_takes_nothing():
    pool = Pool(models("a", "b"), 2**33, turn=1, timeout=0)
    readiness = Readiness(pool)
    app = make_pool_app(pool, ServerOptions(), Metrics(), readiness, None, list)
    readiness.draining = True
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://pool") as client:
        answer = await client.post("/v1/completions", json={"model": "a", "prompt": "a"})
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "server_stopping"
