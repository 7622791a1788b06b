"""The description of the router's own API: each field has a text, and answers are as described."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from toolkit_lm_router.app import create_app
from toolkit_lm_router.fleet import Fleet
from toolkit_lm_router.metrics import RouterMetrics
from toolkit_lm_router.options import RouterOptions
from toolkit_lm_router.proxy import Proxy
from toolkit_lm_router.upstream import Upstream

OPTIONS = RouterOptions(backend=["http://127.0.0.1:9"], admin_key="ops")


def document() -> dict[str, Any]:
    fleet = Fleet(OPTIONS)
    proxy = Proxy(OPTIONS, fleet, Upstream(OPTIONS), None)
    return create_app(OPTIONS, fleet, proxy, RouterMetrics(fleet, lambda: 0)).openapi()


def test_each_field_has_a_text():
    schemas = document()["components"]["schemas"]
    assert {"BackendInfo", "BackendBody", "RouterStatus", "RoutedModels"} <= schemas.keys()
    fields = {
        f"{kind}.{name}": part
        for kind, schema in schemas.items()
        for name, part in schema.get("properties", {}).items()
    }
    assert [name for name, part in fields.items() if "description" not in part] == []


def test_each_route_has_a_text_and_an_answer():
    for path, methods in document()["paths"].items():
        for method, route in methods.items():
            assert route.get("description"), (path, method)
            assert "200" in route["responses"], (path, method)


def test_figures_are_described_as_text():
    assert [*document()["paths"]["/metrics"]["get"]["responses"]["200"]["content"]] == [
        "text/plain"
    ]


@pytest.mark.anyio
async def test_answers_are_as_described(make_routing, make_stub):
    described = document()
    key = {"Authorization": "Bearer ops"}
    backend = make_stub()
    seen = set()
    async with make_routing(backend, admin_key="ops") as routed:
        await routed.post(prompt="a" * 600)

        def check(method: str, path: str, status: int, body: bytes) -> None:
            answers = described["paths"][path][method]["responses"]
            answer = answers.get(str(status)) or answers["default"]
            schema = answer["content"]["application/json"].get("schema", {})
            jsonschema.validate(json.loads(body), schema | {"components": described["components"]})
            seen.add((method, path))

        for down in (False, True):
            for path, methods in described["paths"].items():
                if "get" in methods and path != "/metrics":
                    check("get", path, *await routed.get(path, key))
            if not down:
                backend.health = 503
                await routed.until("down", backend)
        for path in ("drain", "add", "remove", "remove"):
            path = f"/router/backends/{path}"
            for body in ({"url": backend.url}, {"url": "x"}, {"url": 7}, {"urls": "a"}, {}):
                status, answer = await routed.post(path, key, **body)
                assert status in (200, 400, 404)
                check("post", path, status, answer)
    routes = {(m, p) for p, methods in described["paths"].items() for m in methods}
    assert routes - seen == {("get", "/metrics")}
