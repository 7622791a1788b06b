"""RequestSpans: from a request's events to its span."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from toolkit_lm import __version__
from toolkit_lm.events import Event, RequestEvent

PROVIDER = "toolkit_lm"
"""gen_ai.provider.name"""

_OPERATION = "gen_ai.operation.name"
_MODEL = "gen_ai.request.model"
_FROM_SERVER = {"route": "http.route", "request_id": "toolkit_lm.request_id"}
"""Entries of a context, and what the attributes are called that they become."""
_W3C = TraceContextTextMapPropagator()


class _Open(NamedTuple):
    """A request that has not ended."""

    span: Span
    epoch: int
    """Nanoseconds from the epoch to the zero of time.monotonic(), when the request came."""

    def at(self, moment: float) -> int:
        """`moment`, of time.monotonic(), in nanoseconds since the epoch."""
        return self.epoch + round(moment * 1e9)


class RequestSpans:
    """Makes the spans of one engine's requests. An EventListener.

    The parent is the span that the headers `traceparent` and `tracestate` in the request's context
    name, else the one that is current where the event comes in. Entries of the context whose keys
    start with "gen_ai." become attributes, and so do those that the HTTP server puts there.
    """

    def __init__(self, provider: TracerProvider, model: str, close: Callable[[], None]) -> None:
        """`close` is called once: by `close`, or when this object is collected, or at the
        interpreter's exit."""
        self._tracer = provider.get_tracer("toolkit_lm", __version__)
        self._model = model
        self._open: dict[str, _Open] = {}
        self._close = weakref.finalize(self, close)

    def on_event(self, event: Event) -> None:
        """Takes in a RequestEvent; others are of no interest here."""
        if not isinstance(event, RequestEvent):
            return
        if event.kind == "queued":
            self._begin(event)
        elif event.kind in ("finished", "aborted"):
            self._end(event)
        elif found := self._open.get(event.request_id):
            found.span.add_event(event.kind, timestamp=found.at(event.time))

    def close(self) -> None:
        """Ends the spans of requests that their engine left behind, and gives the last spans
        away."""
        for request_id in list(self._open):
            self._abandon(request_id)
        self._close()

    def _begin(self, event: RequestEvent) -> None:
        # An engine that was restarted knows nothing of its requests any more, and their ids may
        # come again.
        self._abandon(event.request_id)
        epoch = time.time_ns() - time.monotonic_ns()
        is_chat = event.context.get("route", "").endswith("/chat/completions")
        attributes: dict[str, str | int] = {
            _OPERATION: "chat" if is_chat else "text_completion",
            "gen_ai.provider.name": PROVIDER,
            _MODEL: self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": event.request_id,
            **{
                name: event.context[key]
                for key, name in _FROM_SERVER.items()
                if key in event.context
            },
            **{key: value for key, value in event.context.items() if key.startswith("gen_ai.")},
        }
        if event.num_sequences != 1:
            attributes["gen_ai.request.choice.count"] = event.num_sequences
        parent = None
        kind = SpanKind.INTERNAL
        if "traceparent" in event.context:
            parent = _W3C.extract(event.context, Context())
            kind = SpanKind.SERVER
        span = self._tracer.start_span(
            f"{attributes[_OPERATION]} {attributes[_MODEL]}",
            parent,
            kind,
            attributes,
            start_time=epoch + round(event.arrival_time * 1e9),
        )
        if span.is_recording():
            self._open[event.request_id] = _Open(span, epoch)

    def _end(self, event: RequestEvent) -> None:
        found = self._open.pop(event.request_id, None)
        if found is None:
            return
        reason = str(event.finish_reason)
        found.span.set_attributes(
            {
                "gen_ai.response.finish_reasons": [reason],
                "gen_ai.usage.input_tokens": event.num_prompt_tokens,
                "gen_ai.usage.output_tokens": event.num_output_tokens,
                "gen_ai.usage.cache_read.input_tokens": event.num_cached_tokens,
                **dict(_latencies(event)),
            }
        )
        if reason == "timeout":
            _fail(found.span, "timeout", "the request's deadline passed")
        elif reason == "error":
            _fail(found.span, "_OTHER", "the request failed in the engine")
        found.span.end(found.at(event.time))

    def _abandon(self, request_id: str) -> None:
        if found := self._open.pop(request_id, None):
            _fail(found.span, "_OTHER", "the engine ended before the request did")
            found.span.end(found.at(time.monotonic()))


def _latencies(event: RequestEvent) -> Iterator[tuple[str, float]]:
    """Seconds between a request's arrival, its place in a batch, its first token and its end, by
    their names in vLLM's spans."""
    arrival = event.arrival_time
    scheduled = event.scheduled_time
    first = event.first_token_time
    end = event.time
    yield "gen_ai.latency.e2e", end - arrival
    if scheduled is not None:
        yield "gen_ai.latency.time_in_queue", scheduled - arrival
        yield "gen_ai.latency.time_in_model_inference", end - scheduled
    if first is not None:
        yield "gen_ai.latency.time_to_first_token", first - arrival
        yield "gen_ai.latency.time_in_model_decode", end - first
    if scheduled is not None and first is not None:
        yield "gen_ai.latency.time_in_model_prefill", first - scheduled


def _fail(span: Span, error_type: str, description: str) -> None:
    span.set_attribute("error.type", error_type)
    span.set_status(Status(StatusCode.ERROR, description))
