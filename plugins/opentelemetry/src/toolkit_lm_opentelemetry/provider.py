"""Finds the tracer provider for spans: the host app's, or one of our own made from the OTEL_*
variables."""

from __future__ import annotations

import importlib.metadata
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from opentelemetry import trace
from toolkit_lm.errors import PluginError, nearest
from toolkit_lm.plugin import PluginWarning

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter

_GROUP = "opentelemetry_traces_exporter"
_LAST_EXPORT = 1.0
"""Seconds that the end of an engine waits for a collector to take the last spans."""


class Provider(NamedTuple):
    """A tracer provider, and what to call when its engine ends."""

    provider: trace.TracerProvider
    close: Callable[[], None]


def find_provider(endpoint: str | None) -> Provider | None:
    """The provider for an engine's spans; None if no destination is configured.

    Raises PluginError if there is no exporter for `endpoint`. A missing exporter that only the
    environment asks for is a warning."""
    if endpoint is not None:
        return _own_provider([_exporter("otlp", endpoint)])
    host = trace.get_tracer_provider()
    if not isinstance(host, trace.ProxyTracerProvider):
        return Provider(host, lambda: None)
    try:
        exporters = [_exporter(name, None) for name in _wanted_exporters()]
    except PluginError as error:
        warnings.warn(f"no traces: {error}", PluginWarning, stacklevel=2)
        return None
    return _own_provider(exporters) if exporters else None


def _wanted_exporters() -> Iterator[str]:
    """Names as in OTEL_TRACES_EXPORTER. An endpoint alone means otlp."""
    listed = os.environ.get("OTEL_TRACES_EXPORTER", "")
    if not listed and any(
        os.environ.get(f"OTEL_EXPORTER_OTLP_{name}ENDPOINT") for name in ("", "TRACES_")
    ):
        listed = "otlp"
    return (name for entry in listed.split(",") if (name := entry.strip()) not in ("", "none"))


def _exporter(name: str, endpoint: str | None) -> SpanExporter:
    protocol = (
        os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or "http/protobuf"
    )
    is_http = protocol != "grpc"
    entry = f"otlp_proto_{'http' if is_http else 'grpc'}" if name == "otlp" else name
    installed = importlib.metadata.entry_points(group=_GROUP)
    if entry not in installed.names:
        hint = (
            " `pip install toolkit-lm-opentelemetry[otlp]` brings one."
            if entry == "otlp_proto_http"
            else ""
        )
        raise PluginError(
            f"no OpenTelemetry exporter {entry!r} is installed. "
            f"{nearest(entry, installed.names)}{hint}"
        )
    kind = installed[entry].load()
    if endpoint is None:
        return kind()  # type: ignore[no-any-return]
    if is_http and urlsplit(endpoint).path in ("", "/"):
        endpoint = f"{endpoint.rstrip('/')}/v1/traces"
    return kind(endpoint=endpoint)  # type: ignore[no-any-return]


def _own_provider(exporters: list[SpanExporter]) -> Provider:
    """A provider that is not the global one: other libraries of the host app do not see it."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))

    ended = threading.Event()

    def shut_down() -> None:
        ended.wait()
        provider.shutdown()

    # The SDK waits for an unreachable collector much longer, and no thread can be started any more
    # when the interpreter exits.
    last = threading.Thread(target=shut_down, name="opentelemetry-shutdown", daemon=True)
    last.start()

    def close() -> None:
        ended.set()
        last.join(_LAST_EXPORT)

    return Provider(provider, close)


def _resource() -> Resource:
    """Resource from OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES. It always has a service
    name."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource

    found = Resource.create()
    if str(found.attributes[SERVICE_NAME]).startswith("unknown_service"):
        found = found.merge(Resource({SERVICE_NAME: "toolkit-lm"}))
    return found
