"""Requests that are generated from the app's own /openapi.json: what comes back is what the
document says, and never a 5xx.

The document is the list of routes: those of installed plugins join by themselves. Requests follow
its schemas, or break them in one place.
"""

from __future__ import annotations

import json
import shutil
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
)
CLASSIFIES = ("/classify",)
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
"""What follows the schema may still not fit the model (its tasks, vocabulary and length), or
another field. What does not may ask for nothing: null, false, and fields that nobody knows.
"""
EXPECTED = ["2xx", "3xx", "4xx", "504"]
"""504: the client's own `timeout` was over."""
NO_SUCCESS = ("POST /infill", "POST /invocations")
"""The model's tokenizer has no tokens for filling in; a body is that of one of several routes,
which no schema says."""
SECOND_NAMES = ("/v1/score", "/v1/rerank")
"""Routes whose handler and schemas are those of another route. They are asked at night, as are, of
an engine that generates, those of RENDERS."""
PHASES_OFF = ("stateful",)
"""No request needs what another has made."""


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
        "id2label": {"0": "angry", "1": "calm", "2": "glad"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Findings:
    """What came back, by operation, and what must not have."""

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
    engine: AsyncLLM | Rendering, name: str, max_examples: int, without: Sequence[str] = ()
) -> Findings:
    """Of all operations that this engine can succeed in."""
    app = app_of(engine)
    app.openapi_schema = strict(app.openapi())
    settings = {
        "seed": 1,
        "continue-on-failure": True,
        "warnings": False,
        "request-timeout": 120,
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
        "phases": {phase: {"enabled": False} for phase in PHASES_OFF},
    }
    schema = schemathesis.openapi.from_asgi(
        "/openapi.json", app, config=SchemathesisConfig.from_dict(settings)
    )
    if name == "generate":
        schema = schema.exclude(path=[*EMBEDS, *CLASSIFIES])
    elif name == "render":
        schema = schema.include(path=list(RENDERS))
    else:
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


def check(found: Findings) -> None:
    assert found.wrong == [], "\n".join(found.wrong[:10])
    # Else some schemas of answers would not have been looked at.
    for name, described in found.described.items():
        assert found.kinds.get(name, set()) == (set() if name in NO_SUCCESS else described), name


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=() if one == "classify" else pytest.mark.slow) for one in ENGINES],
)
def test_answers_are_as_described(engine_of, name):
    """Most of these requests are each field's own values, whatever the number of examples."""
    without = (*SECOND_NAMES, *(RENDERS if name == "generate" else ()))
    check(findings(engine_of(name), name, max_examples=30, without=without))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ENGINES)
def test_many_answers_are_as_described(engine_of, name):
    check(findings(engine_of(name), name, max_examples=500))
