"""Spans of real requests, in memory."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from toolkit_lm import LLM, AsyncLLM, SamplingParams, VllmConfig
from toolkit_lm.errors import CapacityError
from toolkit_lm.events import RequestEvent, StepEvent
from toolkit_lm.frontend import LLMEngine
from toolkit_lm.plugin import hookimpl
from toolkit_lm_opentelemetry.spans import RequestSpans

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


class Traced:
    """A plugin that makes spans as the installed one does, into memory."""

    name = "traced"

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.closed = 0

    @hookimpl
    def toolkit_watch(self, config):
        return RequestSpans(self.provider, config.served_model_name, self._close)

    def _close(self):
        self.closed += 1

    @property
    def spans(self):
        return sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time)


@pytest.fixture
def traced():
    return Traced()


def engine_of(traced, **options):
    return LLMEngine(VllmConfig.make(model="tiny", **options), plugins=[traced])


def run(engine):
    while engine.has_unfinished_requests():
        engine.step()


def test_the_span_of_a_request(traced):
    before = time.time_ns()
    with LLM("tiny", plugins=[traced]) as llm:
        (output,) = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
        (span,) = traced.spans
    after = time.time_ns()
    assert (span.name, span.kind, span.parent, span.status.status_code) == (
        "text_completion tiny",
        SpanKind.INTERNAL,
        None,
        StatusCode.UNSET,
    )
    attributes = dict(span.attributes)
    latencies = {
        key: attributes.pop(key) for key in list(attributes) if key.startswith("gen_ai.latency.")
    }
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "toolkit_lm",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": "llm-0",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": len(output.prompt_token_ids),
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    # Clocks of the two kinds may drift apart by some ms.
    assert before - 10_000_000 <= span.start_time < span.end_time <= after + 10_000_000
    seconds = (span.end_time - span.start_time) / 1e9
    part = {name.removeprefix("gen_ai.latency."): value for name, value in latencies.items()}
    assert part["e2e"] == pytest.approx(seconds, abs=1e-6)
    assert part["time_in_queue"] + part["time_in_model_inference"] == pytest.approx(part["e2e"])
    assert part["time_in_queue"] + part["time_in_model_prefill"] == pytest.approx(
        part["time_to_first_token"]
    )
    assert part["time_to_first_token"] + part["time_in_model_decode"] == pytest.approx(part["e2e"])
    assert [event.name for event in span.events] == ["scheduled", "first_token"]
    assert traced.closed == 1


def test_times_are_those_of_the_events(traced):
    listener = traced.toolkit_watch(VllmConfig.make(model="tiny"))
    zero = time.monotonic() - 10
    epoch = time.time() - 10
    request = {
        "request_id": "1",
        "arrival_time": zero,
        "num_prompt_tokens": 3,
        "num_cached_tokens": 2,
        "num_output_tokens": 7,
    }
    listener.on_event(RequestEvent(kind="queued", time=zero + 0.5, **request))
    listener.on_event(
        RequestEvent(kind="scheduled", time=zero + 1, **request, scheduled_time=zero + 1)
    )
    listener.on_event(
        RequestEvent(
            kind="first_token",
            time=zero + 3,
            **request,
            scheduled_time=zero + 1,
            first_token_time=zero + 3,
        )
    )
    times = {"scheduled_time": zero + 1, "first_token_time": zero + 3}
    listener.on_event(
        RequestEvent(kind="finished", time=zero + 7, **request, **times, finish_reason="stop")
    )
    (span,) = traced.spans
    assert span.start_time / 1e9 == pytest.approx(epoch, abs=2)
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(7)
    assert [(event.name, (event.timestamp - span.start_time) / 1e9) for event in span.events] == [
        ("scheduled", pytest.approx(1)),
        ("first_token", pytest.approx(3)),
    ]
    assert {
        key: value
        for key, value in span.attributes.items()
        if key.startswith(("gen_ai.latency.", "gen_ai.usage."))
    } == {
        "gen_ai.latency.e2e": pytest.approx(7),
        "gen_ai.latency.time_in_queue": pytest.approx(1),
        "gen_ai.latency.time_to_first_token": pytest.approx(3),
        "gen_ai.latency.time_in_model_prefill": pytest.approx(2),
        "gen_ai.latency.time_in_model_decode": pytest.approx(4),
        "gen_ai.latency.time_in_model_inference": pytest.approx(6),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 2,
    }


def test_the_parent_is_that_of_the_w3c_headers(traced):
    with engine_of(traced) as engine:
        engine.add_request("child", "Once", GREEDY, context=HEADERS)
        engine.add_request("malformed", "Once", GREEDY, context={"traceparent": "00-0-0-1"})
        engine.add_request(
            "unsampled", "Once", GREEDY, context={"traceparent": f"00-{TRACE}-{PARENT}-00"}
        )
        run(engine)
    spans = {span.attributes["gen_ai.response.id"]: span for span in traced.spans}
    child = spans["child"]
    assert (f"{child.context.trace_id:032x}", f"{child.parent.span_id:016x}") == (TRACE, PARENT)
    assert child.parent.is_remote and child.kind is SpanKind.SERVER
    assert child.context.trace_state.to_header() == "vendor=1"
    assert spans["malformed"].parent is None
    assert set(spans) == {"child", "malformed"}


def test_the_parent_is_the_current_span_where_there_are_no_headers(traced):
    with (
        LLM("tiny", plugins=[traced]) as llm,
        traced.provider.get_tracer("app").start_as_current_span("app") as app,
    ):
        llm.generate(["Once", "Twice"], GREEDY, use_tqdm=False)
        llm.generate("Thrice", GREEDY, use_tqdm=False)
    children = [span for span in traced.spans if span.name != "app"]
    assert [span.parent.span_id for span in children] == [app.get_span_context().span_id] * 3
    assert len({span.context.trace_id for span in traced.spans}) == 1


def test_the_context_may_give_attributes(traced):
    context = {"gen_ai.operation.name": "chat", "gen_ai.conversation.id": "c1", "other": "x"}
    with engine_of(traced, served_model_name="mine") as engine:
        engine.submit(
            engine.processor.prepare_chat(
                "1", [{"role": "user", "content": "Hello"}], GREEDY, {"context": context}
            )
        )
        run(engine)
    (span,) = traced.spans
    assert span.name == "chat mine"
    assert (
        span.attributes["gen_ai.operation.name"],
        span.attributes["gen_ai.conversation.id"],
    ) == ("chat", "c1")
    assert "other" not in span.attributes


def test_several_sequences_are_one_span(traced):
    with LLM("tiny", plugins=[traced]) as llm:
        llm.generate(
            "Once", SamplingParams(n=3, max_tokens=5, ignore_eos=True, seed=1), use_tqdm=False
        )
    (span,) = traced.spans
    assert (
        span.attributes["gen_ai.request.choice.count"],
        span.attributes["gen_ai.usage.output_tokens"],
    ) == (3, 15)


def test_a_stop_text_ends_the_span_at_once(traced):
    with LLM("tiny", plugins=[traced]) as llm:
        (output,) = llm.generate(
            "Once upon a time", SamplingParams(temperature=0, max_tokens=16), use_tqdm=False
        )
        stop = output.outputs[0].text[3:6]
        llm.generate(
            "Once upon a time",
            SamplingParams(temperature=0, max_tokens=16, stop=stop),
            use_tqdm=False,
        )
        assert [span.attributes["gen_ai.response.finish_reasons"] for span in traced.spans][1] == (
            "stop",
        )


def test_cached_prompt_tokens_are_counted(traced):
    prompt = {"prompt_token_ids": [5] * 64}
    with LLM("tiny", plugins=[traced], enable_prefix_caching=True) as llm:
        for _ in range(2):
            (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert output.num_cached_tokens > 0
    assert [span.attributes["gen_ai.usage.cache_read.input_tokens"] for span in traced.spans] == [
        0,
        output.num_cached_tokens,
    ]


def test_preemptions_are_events_of_the_span(traced):
    # 2 sequences of 80 tokens take 10 blocks of 16; there are 8.
    prompts = [{"prompt_token_ids": [token] * 40} for token in (5, 6)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(
        "tiny",
        plugins=[traced],
        block_size=16,
        num_kv_blocks=8,
        max_model_len=96,
        enable_prefix_caching=False,
    ) as llm:
        llm.generate(prompts, params, use_tqdm=False)
    names = [[event.name for event in span.events] for span in traced.spans]
    assert names[0] == ["scheduled", "first_token"]
    assert names[1][:2] == ["scheduled", "first_token"] and set(names[1][2:]) == {"preempted"}
    assert all(
        span.start_time <= event.timestamp <= span.end_time
        for span in traced.spans
        for event in span.events
    )


def test_an_aborted_request(traced):
    with engine_of(traced) as engine:
        engine.add_request("1", "Once", SamplingParams(max_tokens=100, ignore_eos=True))
        engine.step()
        engine.abort("1")
    (span,) = traced.spans
    assert span.status.status_code is StatusCode.UNSET
    assert span.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert "error.type" not in span.attributes


def test_a_request_that_times_out(traced):
    with engine_of(traced) as engine:
        engine.add_request(
            "1", "Once", SamplingParams(max_tokens=100, ignore_eos=True), timeout=1e-6
        )
        run(engine)
    (span,) = traced.spans
    assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.ERROR, "timeout")
    assert span.attributes["gen_ai.response.finish_reasons"] == ("timeout",)
    assert "gen_ai.latency.time_in_queue" not in span.attributes


def test_a_request_that_fails(traced, monkeypatch):
    with engine_of(traced) as engine:
        executor = engine.client.core.executor
        execute = executor.execute

        def fails(plan):
            result = execute(plan).result()
            result.errors = {row.seq_id: "no such luck" for row in plan.scheduled}
            future = Future()
            future.set_result(result)
            return future

        monkeypatch.setattr(executor, "execute", fails)
        engine.add_request("1", "Once", GREEDY)
        run(engine)
    (span,) = traced.spans
    assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.ERROR, "_OTHER")
    assert span.attributes["gen_ai.response.finish_reasons"] == ("error",)


def test_an_engine_that_ends_before_its_requests(traced):
    with engine_of(traced) as engine:
        engine.add_request("1", "Once", SamplingParams(max_tokens=100, ignore_eos=True))
        engine.step()
    engine.close()
    (span,) = traced.spans
    assert span.status.status_code is StatusCode.ERROR
    assert "the engine ended" in span.status.description
    assert traced.closed == 1


def test_an_id_that_comes_again_after_its_engine_was_restarted(traced):
    listener = traced.toolkit_watch(VllmConfig.make(model="tiny"))
    for _ in range(2):
        now = time.monotonic()
        listener.on_event(
            RequestEvent(
                kind="queued", request_id="1", time=now, arrival_time=now, num_prompt_tokens=3
            )
        )
        assert listener.on_event(StepEvent(time=now, duration=1, num_tokens=1)) is None
    listener.close()
    assert [span.status.status_code for span in traced.spans] == [StatusCode.ERROR] * 2


def test_an_engine_that_cannot_start_leaves_nothing_open(traced):
    with pytest.raises(CapacityError):
        engine_of(traced, num_kv_blocks=1)
    assert traced.closed == 1


def test_a_restart_ends_the_spans_of_the_engine_before(traced):
    with engine_of(traced) as engine:
        engine.add_request("1", "Once", GREEDY)
        engine.step()
        engine.restart()
        engine.wait_ready()
        engine.add_request("1", "Once", GREEDY)
        run(engine)
    assert [span.status.status_code for span in traced.spans] == [
        StatusCode.ERROR,
        StatusCode.UNSET,
    ]
    assert traced.closed == 2


def test_an_engine_in_a_process_of_its_own(traced):
    async def requests():
        async with AsyncLLM(
            VllmConfig.make(model="tiny", engine_process=True), plugins=[traced]
        ) as llm:
            async for _ in llm.generate("Once", GREEDY, request_id="whole", context=HEADERS):
                pass
            left = llm.generate(
                "Once", SamplingParams(max_tokens=400, ignore_eos=True), request_id="left"
            )
            async for _ in left:
                break
            await left.aclose()
            async for _ in llm.generate("Once", GREEDY, request_id="after"):
                pass

    asyncio.run(requests())
    spans = {span.attributes["gen_ai.response.id"]: span for span in traced.spans}
    reasons = {
        request_id: span.attributes["gen_ai.response.finish_reasons"]
        for request_id, span in spans.items()
    }
    assert reasons == {"whole": ("length",), "left": ("abort",), "after": ("length",)}
    assert f"{spans['whole'].parent.span_id:016x}" == PARENT
    assert spans["left"].parent is None
    assert [event.name for event in spans["whole"].events] == ["scheduled", "first_token"]
    assert traced.closed == 1


def test_two_engines_do_not_meet():
    one = Traced()
    other = Traced()
    with (
        engine_of(one, served_model_name="one") as first,
        engine_of(other, served_model_name="other") as second,
    ):
        for engine in (first, second):
            engine.add_request("same", "Once", GREEDY)
        while first.has_unfinished_requests() or second.has_unfinished_requests():
            first.step()
            second.step()
    assert [[span.name for span in traced.spans] for traced in (one, other)] == [
        ["text_completion one"],
        ["text_completion other"],
    ]


def test_the_global_provider_is_left_alone(traced):
    with LLM("tiny", plugins=[traced]) as llm:
        llm.generate("Once", GREEDY, use_tqdm=False)
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
