"""A request over HTTP and its span: the server and the OpenTelemetry plugin know each other through
the events alone."""

from __future__ import annotations

import asyncio

import httpx
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm.plugin import hookimpl
from toolkit_lm_opentelemetry.spans import RequestSpans
from toolkit_lm_server.app import create_app

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}


class Traced:
    name = "traced"

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()

    @hookimpl
    def toolkit_watch(self, config):
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        return RequestSpans(provider, config.served_model_name, lambda: None)


async def answers(traced):
    async with (
        AsyncLLM(VllmConfig.make(model="tiny"), plugins=[traced]) as llm,
        httpx.AsyncClient(
            transport=httpx.ASGITransport(create_app(llm)), base_url="http://test"
        ) as client,
    ):
        chat = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "What is the opposite of hot?"}],
            "max_tokens": 4,
        }
        plain = {"model": "tiny", "prompt": ["Once", "Twice"], "max_tokens": 4}
        for path, body, headers in (
            ("/v1/chat/completions", chat, HEADERS),
            ("/v1/completions", plain, {}),
        ):
            answer = await client.post(path, json=body, headers=headers)
            assert answer.status_code == 200, (answer.text, llm.error)
            yield answer


async def collect(traced):
    return [answer async for answer in answers(traced)]


def test_a_request_over_http_continues_its_callers_trace():
    traced = Traced()
    chat, plain = asyncio.run(collect(traced))
    spans = sorted(traced.exporter.get_finished_spans(), key=lambda span: span.start_time)
    assert [span.name for span in spans] == [
        "chat tiny",
        "text_completion tiny",
        "text_completion tiny",
    ]
    first = spans[0]
    assert (f"{first.context.trace_id:032x}", f"{first.parent.span_id:016x}", first.kind) == (
        TRACE,
        PARENT,
        SpanKind.SERVER,
    )
    assert first.attributes["http.route"] == "/v1/chat/completions"
    assert first.attributes["toolkit_lm.request_id"] == chat.headers["x-request-id"] == "mine"
    usage = chat.json()["usage"]
    assert first.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert first.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert [span.parent for span in spans[1:]] == [None, None]
    assert {span.attributes["toolkit_lm.request_id"] for span in spans[1:]} == {
        plain.headers["x-request-id"]
    }
