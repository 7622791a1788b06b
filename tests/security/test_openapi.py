"""Requests that are generated from the app's own /openapi.json: what comes back is what the
document says, and never a 5xx.

The document is the list of routes: those of installed plugins join by themselves. Requests follow
its schemas, or break them in one place.
"""

from __future__ import annotations

import copy
import json
import shutil
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import schemathesis
import toolkit_lm_tiny
from fastapi import FastAPI
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import events, from_schema
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm.plugin import Plugins
from toolkit_lm_router.app import create_app as create_router_app
from toolkit_lm_router.fleet import Fleet
from toolkit_lm_router.metrics import RouterMetrics
from toolkit_lm_router.options import RouterOptions
from toolkit_lm_router.proxy import Proxy
from toolkit_lm_router.upstream import Upstream
from toolkit_lm_server.app import create_app
from toolkit_lm_server.health import Readiness
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.plugin_routes import HOOK
from toolkit_lm_server.rendering import Rendering, create_render_app

SMALL = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_model_len": 48,
    "engine_process": False,
}
EMBEDS = (
    "/v1/embeddings",
    "/v1/embed",
    "/v2/embed",
    "/pooling",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/api/embed",
    "/api/embeddings",
    "/embed",
    "/embed_all",
    "/embed_sparse",
    "/similarity",
    "/encode",
    "/embedding",
    "/embeddings",
    "/reranking",
    "/v1/reranking",
    "/v2/models/{name}/infer",
)
CLASSIFIES = ("/classify", "/predict", "/v1/moderations")
ENGINES = ("generate", "embed", "classify", "render")
RENDERS = (
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/derender",
    "/tokenize",
    "/detokenize",
    "/v1/models",
)
CHECKS_OFF = ("positive_data_acceptance", "negative_data_rejection")
"""Checks that are off, and what they report.

positive_data_acceptance: refusals that no schema of a field could say. Fields are of one body and
exclude or need each other ("give either input or messages", queries and text_1, texts and
documents). The model decides: the task, prompts and instructions that it has not, dimensions,
tokens and lengths. Two names of one field have different values. Messages are a template's to
judge. A field of another server has a value that asks for something (adaptive_decay).
Texts and lists of inputs are empty: their types are unions, whose errors name the item that is
wrong. A mapping {} has neither a text nor an image.

negative_data_rejection: what a body asks nothing by is ignored, or taken as absent: null, false,
unknown fields, and any value of a field without effect.
"""
EXPECTED = ["2xx", "3xx", "4xx", "501", "504"]
"""501: a route of another server's API that this one refuses by name. 504: the client's own
`timeout` was over."""
NO_SUCCESS = (
    "POST /infill",
    "POST /invocations",
    "POST /embed_sparse",
    "POST /props",
    "POST /slots/{slot}",
    "POST /init_weight_transfer_engine",
    "POST /update_weights",
    "POST /finish_weight_update",
    "POST /collective_rpc",
)
"""The model's tokenizer has no tokens for filling in; a body is that of one of several routes,
which no schema says; no vectors here are sparse; two of llama.cpp's are refused whatever they say;
there is no folder of weights, no trainer, and no extension of workers."""
BY_CHANCE = ("GET /v2/models/{name}", "GET /v2/models/{name}/ready", "POST /v2/models/{name}/infer")
"""Routes with a model's name in their path, which no schema says."""
HALTS = ("/pause", "/sleep")
"""Routes after which the engine answers nobody until another request."""
SECOND_NAMES = ("/v1/score", "/v1/rerank", "/embeddings", "/v1/reranking")
"""Routes whose handler and schemas are those of another route. They are asked at night, as are, of
an engine that generates, those of RENDERS."""
PHASES = ("examples", "coverage", "fuzzing")
"""Left out is "stateful": no request needs what another has made."""
COPIES = 2
"""Routes that each value of a field is sent to, of those that have the field. At night: all. A
field of other servers that has no effect here is sent to one."""
OPERATOR = "ops"
"""The key of a router's operators."""
HEALTH = ("/health", "/ready", "/ping")
"""Routes that answer 503 as soon as the router has no backend. Requests name those that the list of
backends tells: operators remove all of them."""
DECIDING = {"stream", "response_format", "encoding_format", "embed_dtype", "stream_format"}
"""Fields that decide the content type of an answer. They are sent to all routes."""


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory) -> Iterator[Any]:
    """engine_of(name): one of ENGINES."""
    made: dict[str, AsyncLLM | Rendering] = {}

    def get(name: str) -> AsyncLLM | Rendering:
        if name not in made:
            options = (
                {"model": "tiny", "convert": "embed"} if name == "embed" else {"model": "tiny"}
            )
            if name == "classify":
                options = {
                    "model": str(classifier(tmp_path_factory.mktemp("classifier"))),
                    "load_format": "dummy",
                }
            config = VllmConfig.make(**options, **SMALL)
            made[name] = (
                Rendering(config, Plugins.load(config.plugins))
                if name == "render"
                else AsyncLLM(config)
            )
        return made[name]

    yield get
    for engine in made.values():
        engine.close()


def classifier(folder: Path) -> Path:
    """A checkpoint with tiny's tokenizer, and three labels."""
    tiny = Path(toolkit_lm_tiny.__file__).parent / "checkpoint"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, folder)
    config = json.loads((tiny / "config.json").read_text())
    config |= {
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": {"0": "angry", "1": "neutral", "2": "glad"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Findings:
    """Results by operation, and faults among them."""

    def __init__(self) -> None:
        self.kinds: dict[str, set[str]] = {}
        """Content types of successes."""
        self.described: dict[str, set[str]] = {}
        self.wrong: list[str] = []

    def take(self, event: events.EngineEvent) -> None:
        if isinstance(event, events.NonFatalError | events.FatalError):
            self.wrong.append(repr(vars(event)))
        if not isinstance(event, events.ScenarioFinished):
            return
        recorder = event.recorder
        for key, interaction in recorder.interactions.items():
            case = recorder.cases[key].value
            response = interaction.response
            if response is None:
                self.wrong.append(f"{case.method} {case.path} {case.body!s:.300}: no answer")
                continue
            kinds = self.kinds.setdefault(case.operation.label, set())
            if response.status_code == 200:
                kinds.add(response.headers["content-type"][0].partition(";")[0])
            for check in recorder.checks.get(key, ()):
                if check.failure_info is not None:
                    found = (
                        f"{check.failure_info.failure.message} in {response.status_code} "
                        f"{response.text[:300]}"
                    )
                    self.wrong.append(
                        f"{check.name}: {case.method} {case.path} {case.body!s:.300}: {found}"
                    )


def app_of(engine: AsyncLLM | Rendering) -> FastAPI:
    """All routes that may be served over it."""
    if isinstance(engine, Rendering):
        return create_render_app(
            engine, ServerOptions(), metrics=Metrics(), readiness=Readiness(engine)
        )
    routes = [info.name for info, _ in engine.plugins.implementations(HOOK)]
    return create_app(engine, ServerOptions(admin_routes=True, routes=routes), metrics=Metrics())


def findings(
    app: FastAPI,
    name: str,
    max_examples: int,
    without: Sequence[str] = (),
    phases: Sequence[str] = PHASES,
) -> Findings:
    """Findings of all operations that can succeed on the engine of that name, or of a router's.
    Requests follow the app's `openapi_schema`."""
    settings: dict[str, Any] = {
        "seed": 1,
        "continue-on-failure": True,
        "warnings": False,
        "request-timeout": 120,
        "headers": {"Authorization": f"Bearer {OPERATOR}"} if name == "router" else {},
        "checks": {
            **{check: {"enabled": False} for check in CHECKS_OFF},
            "not_a_server_error": {"expected-statuses": EXPECTED},
        },
        "generation": {
            "mode": "all",
            "max-examples": max_examples,
            "deterministic": True,
            "no-shrink": True,
            "database": "none",
        },
        "phases": {phase: {"enabled": phase in phases} for phase in (*PHASES, "stateful")},
        "operations": [
            {
                "include-path": path,
                "checks": {"not_a_server_error": {"expected-statuses": [*EXPECTED, "503"]}},
            }
            for path in (HEALTH if name == "router" else ())
        ],
    }
    schema = schemathesis.openapi.from_asgi(
        "/openapi.json", app, config=SchemathesisConfig.from_dict(settings)
    )
    if name == "generate":
        schema = schema.exclude(path=[*EMBEDS, *CLASSIFIES, *HALTS])
    elif name == "render":
        schema = schema.include(path=list(RENDERS))
    elif name != "router":
        schema = schema.include(path=list(EMBEDS if name == "embed" else CLASSIFIES))
    schema = schema.exclude(path=list(without)) if without else schema
    found = Findings()
    for one in schema.get_all_operations():
        operation = one.ok()
        found.described[operation.label] = set(
            operation.definition.raw["responses"]["200"]["content"]
        )
    for event in from_schema(schema).execute():
        found.take(event)
    return found


def strict(part: Any) -> Any:
    """The document without "default", which would allow any error, and with all that an answer may
    have."""
    if isinstance(part, list):
        return [strict(one) for one in part]
    if not isinstance(part, dict):
        return part
    kept = {name: strict(one) for name, one in part.items()}
    if "responses" in part:
        kept["responses"].pop("default", None)
    if isinstance(part.get("properties"), dict) and part.get("type") == "object":
        kept.setdefault("additionalProperties", False)
    return kept


def values(schema: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in schema.items() if name not in ("description", "title")}


def thinned(document: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """The document with each optional field on some of the routes at which it has the same schema:
    COPIES.

    Most fields are the same on all routes. Each route has about as many of them.
    """
    document = copy.deepcopy(document)
    bodies: dict[str, dict[str, Any]] = {}
    for path in paths:
        for operation in document["paths"].get(path, {}).values():
            [content] = operation.get("requestBody", {}).get("content", {}).values() or [{}]
            if "$ref" in content.get("schema", {}):
                name = content["schema"]["$ref"].rpartition("/")[2]
                content["schema"] = copy.deepcopy(document["components"]["schemas"][name])
                bodies[path] = content["schema"]
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path, body in bodies.items():
        for field, schema in body["properties"].items():
            if field not in DECIDING and field not in body.get("required", ()):
                places[field, json.dumps(values(schema), sort_keys=True)].append(path)
    for (field, schema), alike in places.items():
        first = zlib.crc32(field.encode()) % len(alike)
        copies = 1 if json.loads(schema).keys() <= {"type"} else COPIES
        kept = {alike[(first + one) % len(alike)] for one in range(copies)}
        for path in set(alike) - kept:
            del bodies[path]["properties"][field]
    return document


def check(*findings: Findings) -> None:
    wrong = [one for found in findings for one in found.wrong]
    assert wrong == [], "\n".join(wrong[:10])
    # Else some schemas of answers would not have been looked at.
    for name, described in findings[0].described.items():
        kinds = set().union(*(found.kinds.get(name, ()) for found in findings))
        if name in BY_CHANCE and not kinds:
            continue
        assert kinds == (set() if name in NO_SUCCESS else described), name


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=() if one == "classify" else pytest.mark.slow) for one in ENGINES],
)
def test_answers_are_as_described(engine_of, name):
    """Each value of each field on some routes, and random bodies on all."""
    without = (*SECOND_NAMES, *(RENDERS if name == "generate" else ()))
    app = app_of(engine_of(name))
    whole = strict(app.openapi())
    asked = {"embed": EMBEDS, "classify": CLASSIFIES, "render": RENDERS}
    others = (*without, *(() if name in asked else (*EMBEDS, *CLASSIFIES, *HALTS)))
    paths = [path for path in asked.get(name, whole["paths"]) if path not in others]
    app.openapi_schema = thinned(whole, paths)
    found = findings(app, name, 1, without, ["examples", "coverage"])
    app.openapi_schema = whole
    check(found, findings(app, name, 10, without, ["fuzzing"]))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ENGINES)
def test_many_answers_are_as_described(engine_of, name):
    app = app_of(engine_of(name))
    app.openapi_schema = strict(app.openapi())
    check(findings(app, name, max_examples=500))


def router_app(*urls: str) -> FastAPI:
    """The routes of a router with these backends, all of them ready."""
    options = RouterOptions(backend=list(urls), admin_key=OPERATOR)
    fleet = Fleet(options)
    for backend in fleet.backends.values():
        card = {"id": "m", "object": "model", "created": 1, "owned_by": "toolkit-lm"}
        fleet.set_models(backend, [card], 1)
        fleet.set_state(backend, "ready")
    proxy = Proxy(options, fleet, Upstream(options), None)
    app = create_router_app(options, fleet, proxy, RouterMetrics(fleet, lambda: 0))
    app.openapi_schema = strict(app.openapi())
    return app


def test_a_routers_answers_are_as_described():
    """The first is that of the examples."""
    check(findings(router_app("http://10.0.0.2:8000", "http://10.0.0.3:8000"), "router", 20))


def test_answers_without_a_backend_are_as_described():
    assert findings(router_app(), "router", 5).wrong == []
