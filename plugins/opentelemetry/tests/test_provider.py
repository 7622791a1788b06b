"""Destinations of spans: options, the host app's provider, OTEL_* variables, or none."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import toolkit_lm_opentelemetry
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.errors import PluginError
from toolkit_lm.events import RequestEvent
from toolkit_lm.plugin import Plugins, PluginWarning
from toolkit_lm_opentelemetry import Options, toolkit_watch

CONFIG = VllmConfig.make(model="tiny")


class Collector:
    """An OTLP collector over HTTP: keeps the paths and the spans that it is sent."""

    def __init__(self) -> None:
        self.paths = []
        self.spans = []
        self.services = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                message = ExportTraceServiceRequest.FromString(
                    self.rfile.read(int(self.headers["Content-Length"]))
                )
                collector.paths.append(self.path)
                for resource in message.resource_spans:
                    collector.services += [
                        a.value.string_value
                        for a in resource.resource.attributes
                        if a.key == "service.name"
                    ]
                    collector.spans += [
                        span.name for scope in resource.scope_spans for span in scope.spans
                    ]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def collector():
    found = Collector()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


def trace_a_request(listener, request_id="1"):
    now = time.monotonic()
    for kind in ("queued", "scheduled", "first_token", "finished"):
        listener.on_event(
            RequestEvent(
                kind=kind, request_id=request_id, time=now, arrival_time=now, num_prompt_tokens=3
            )
        )


def script(code, **environ):
    """Runs code in a process of its own. Returns what it prints, as JSON."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_off_it_costs_no_import_and_no_event():
    code = """
import json, sys
from toolkit_lm import LLM, SamplingParams
with LLM("tiny") as llm:
    llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)
    plugins = llm.engine.plugins
    print(json.dumps([
        plugins.info("opentelemetry").status,
        plugins.has_event_listeners,
        [name for name in sys.modules if name.split(".")[0] == "opentelemetry"],
    ]))
"""
    assert script(code) == ["ok", False, []]


def test_the_entry_module_is_light():
    code = """
import json, sys, time
import toolkit_lm.plugin.plugins
before, start = set(sys.modules), time.thread_time()
import toolkit_lm_opentelemetry
seconds = time.thread_time() - start
print(json.dumps([seconds, sorted({name.split(".")[0] for name in set(sys.modules) - before})]))
"""
    seconds, imported = script(code)
    assert imported == ["toolkit_lm_opentelemetry"]
    assert seconds < 0.05


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "x"},
    ],
)
def test_without_a_place_for_spans_there_is_no_listener(environ, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert toolkit_watch(CONFIG, Options()) is None


def test_a_disabled_sdk_is_off(monkeypatch):
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert toolkit_watch(CONFIG, Options(endpoint="http://localhost:4318")) is None


@pytest.mark.parametrize("path", ["", "/", "/v1/traces", "/prefix/v1/traces"])
def test_spans_go_to_the_endpoint_of_the_option(collector, path):
    listener = toolkit_watch(CONFIG, Options(endpoint=f"{collector.url}{path}"))
    trace_a_request(listener)
    listener.close()
    assert collector.paths == [path if len(path) > 1 else "/v1/traces"]
    assert (collector.spans, collector.services) == (["text_completion tiny"], ["toolkit-lm"])


@pytest.mark.parametrize(
    "environ",
    [
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "{}"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "{}/v1/traces", "OTEL_TRACES_EXPORTER": "otlp"},
    ],
)
def test_spans_go_where_the_variables_say(collector, environ, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value.format(collector.url))
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    listener = toolkit_watch(CONFIG, Options())
    trace_a_request(listener)
    listener.close()
    assert (collector.paths, collector.spans, collector.services) == (
        ["/v1/traces"],
        ["text_completion tiny"],
        ["mine"],
    )


def test_the_sampler_is_that_of_the_variables(collector, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    listener = toolkit_watch(CONFIG, Options(endpoint=collector.url))
    trace_a_request(listener)
    listener.close()
    assert collector.spans == []


def test_the_option_through_a_whole_engine(collector):
    with LLM("tiny", plugin_option={"opentelemetry": {"endpoint": collector.url}}) as llm:
        llm.generate(["Once", "Twice"], SamplingParams(max_tokens=2), use_tqdm=False)
    assert collector.spans == ["text_completion tiny"] * 2
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider), (
        "the global provider is not ours to set"
    )


REQUEST = """
import json, time
from toolkit_lm.config import VllmConfig
from toolkit_lm.events import RequestEvent
from toolkit_lm.plugin import Plugins
plugins = Plugins.load()
plugins.watch(VllmConfig.make(model="tiny"))
for kind in ("queued", "finished"):
    now = time.monotonic()
    event = RequestEvent(
        kind=kind,
        request_id="1",
        time=now,
        arrival_time=now,
        num_prompt_tokens=3,
        finish_reason="stop",
    )
    plugins.event(event)
"""


def test_the_last_spans_are_sent_at_exit_without_a_shutdown(collector):
    script(
        f"{REQUEST}\nprint(json.dumps(plugins.has_event_listeners))",
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
    )
    assert collector.spans == ["text_completion tiny"]


def test_the_provider_of_the_host_app_is_used_and_not_shut_down():
    code = f"""
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
{REQUEST}
plugins.close()
with provider.get_tracer("app").start_as_current_span("after"):
    pass
print(json.dumps([span.name for span in exporter.get_finished_spans()]))
"""
    assert script(code) == ["text_completion tiny", "after"]


def test_an_unreachable_collector_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "12")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listener = toolkit_watch(
            CONFIG, Options(endpoint=f"http://127.0.0.1:{listening.getsockname()[1]}")
        )
        trace_a_request(listener)
        start = time.monotonic()
        listener.close()
        assert time.monotonic() - start < 10


def test_an_exporter_that_is_not_installed(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(
        PluginError,
        match=r"no OpenTelemetry exporter 'otlp_proto_grpc' is installed.*otlp_proto_http",
    ):
        toolkit_watch(CONFIG, Options(endpoint="http://localhost:4317"))
    # Asked for by the environment alone, which is not about this program only.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4317")
    with pytest.warns(
        PluginWarning, match="no traces: no OpenTelemetry exporter 'otlp_proto_grpc'"
    ):
        assert toolkit_watch(CONFIG, Options()) is None


def test_options_are_checked():
    plugins = PluginsConfig(
        plugins=["opentelemetry"],
        plugin_option={"opentelemetry": {"endpoint": "http://localhost:4318"}},
    )
    assert Plugins.load(plugins).options("opentelemetry") == Options(
        endpoint="http://localhost:4318"
    )
    assert (
        Plugins.load(PluginsConfig(plugins=["opentelemetry"])).info("opentelemetry").file
        == toolkit_lm_opentelemetry.__file__
    )
