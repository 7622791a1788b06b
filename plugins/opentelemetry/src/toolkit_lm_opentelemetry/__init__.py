"""OpenTelemetry traces: one span per request. Off, and without an import, unless something says
where spans go."""

from __future__ import annotations

import os
import sys

from msgspec import Struct
from toolkit_lm.config import VllmConfig
from toolkit_lm.plugin import EventListener, hookimpl

_VARIABLES = (
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
)


class Options(Struct, frozen=True):
    """`--plugin-option opentelemetry.NAME=...`"""

    endpoint: str | None = None
    """URL of an OTLP collector, such as http://localhost:4318. OTEL_* variables, or a provider of
    the host app, do as well."""


@hookimpl
def toolkit_watch(config: VllmConfig, options: Options) -> EventListener | None:
    """A listener that makes spans, or None if tracing is off.

    Spans go to `options.endpoint`; else to the global tracer provider that the host app has set
    before; else to the destination in the OTEL_* variables. Raises PluginError if there is no
    exporter for the endpoint."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    # A host app that has set a provider has imported the API.
    if (
        options.endpoint is None
        and "opentelemetry.trace" not in sys.modules
        and not any(os.environ.get(name) for name in _VARIABLES)
    ):
        return None
    from toolkit_lm_opentelemetry.provider import find_provider
    from toolkit_lm_opentelemetry.spans import RequestSpans

    found = find_provider(options.endpoint)
    return (
        None
        if found is None
        else RequestSpans(found.provider, config.served_model_name, found.close)
    )
