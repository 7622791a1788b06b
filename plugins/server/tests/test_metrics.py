"""The figures for Prometheus."""

from __future__ import annotations

import pytest
from toolkit_lm import LLM
from toolkit_lm.config import PluginsConfig
from toolkit_lm.errors import QueueFullError
from toolkit_lm.events import LoadEvent, RequestEvent, StepEvent
from toolkit_lm.plugin import Plugins
from toolkit_lm_server.app import create_app
from toolkit_lm_server.metrics import Metrics

pytestmark = pytest.mark.anyio
REQUEST = {"request_id": "1", "arrival_time": 10.0, "num_prompt_tokens": 7}


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
async def client(engine, metrics, client_of):
    async with client_of(create_app(engine, metrics=metrics)) as one:
        yield one


async def figures(client) -> dict[str, float]:
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = (line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#"))
    return {name.removeprefix("toolkit_lm_"): float(value) for name, value in lines}


async def test_a_requests_life(client, metrics):
    Plugins.load(PluginsConfig(plugins=["server"]), [metrics])
    for kind, time in (("queued", 10.0), ("scheduled", 11.0), ("preempted", 11.5)):
        metrics.toolkit_event(RequestEvent(kind=kind, time=time, **REQUEST))
    metrics.toolkit_event(RequestEvent(kind="first_token", time=12.0, num_cached_tokens=4, **REQUEST))
    end = {"num_output_tokens": 5, "first_token_time": 12.0, "finish_reason": "length"}
    metrics.toolkit_event(RequestEvent(kind="finished", time=14.0, **REQUEST, **end))
    metrics.toolkit_event(StepEvent(time=14.0, duration=0.5, num_tokens=8))
    expected = {
        "preemptions_total": 1,
        "prompt_tokens_total": 7,
        "cached_prompt_tokens_total": 4,
        "prefix_cache_hits_total": 1,
        "generation_tokens_total": 5,
        'requests_finished_total{reason="length"}': 1,
        "request_queue_time_seconds_sum": 1,
        "time_to_first_token_seconds_sum": 2,
        "time_per_output_token_seconds_sum": 0.5,
        "e2e_request_latency_seconds_sum": 4,
        "step_duration_seconds_sum": 0.5,
        "step_tokens_sum": 8,
    }
    found = await figures(client)
    assert {name: found[name] for name in expected} == expected


async def test_pooled_prompts_count(client, metrics):
    texts = ["a text that is longer than two blocks of the cache", "another"]
    with LLM("tiny", convert="embed", enable_prefix_caching=True, plugins=[metrics]) as llm:
        outputs = [*llm.embed(texts, use_tqdm=False), *llm.embed(texts, use_tqdm=False)]
    cached = [output.num_cached_tokens for output in outputs]
    assert cached[2] >= 16 and cached[0] == 0
    expected = {
        "prompt_tokens_total": sum(len(output.prompt_token_ids) for output in outputs),
        "cached_prompt_tokens_total": sum(cached),
        "prefix_cache_hits_total": sum(count > 0 for count in cached),
        'requests_finished_total{reason="stop"}': 4,
        "time_to_first_token_seconds_count": 0,
    }
    found = await figures(client)
    assert {name: found[name] for name in expected} == expected


async def test_prompts_that_failed_do_not_count(client, metrics):
    metrics.toolkit_event(RequestEvent(kind="finished", time=14.0, finish_reason="error", **REQUEST))
    found = await figures(client)
    assert (found['requests_finished_total{reason="error"}'], found["prompt_tokens_total"]) == (1, 0)


async def test_requests_that_are_ended_from_outside(client, metrics):
    for reason in ("abort", "timeout", "timeout"):
        metrics.toolkit_event(RequestEvent(kind="aborted", time=14.0, num_output_tokens=2, finish_reason=reason, **REQUEST))
    found = await figures(client)
    assert found['requests_aborted_total{reason="abort"}'] == 1
    assert found['requests_aborted_total{reason="timeout"}'] == 2
    assert (found["generation_tokens_total"], found["e2e_request_latency_seconds_count"]) == (6, 0)


async def test_load(client, metrics):
    load = {"num_used_blocks": 5, "num_total_blocks": 10, "num_used_host_blocks": 1, "num_total_host_blocks": 4}
    metrics.toolkit_event(LoadEvent(time=14.0, num_running=3, num_waiting=2, **load))
    expected = {
        "num_sequences_running": 3,
        "num_requests_waiting": 2,
        "kv_cache_usage_ratio": 0.5,
        "kv_cache_host_usage_ratio": 0.25,
    }
    found = await figures(client)
    assert {name: found[name] for name in expected} == expected


async def test_refusals_and_the_engines_status(client, engine):
    engine.failure = QueueFullError("the engine is busy", 1.0)
    await client.post("/v1/completions", json={"prompt": "abc"})
    await client.post("/v1/completions", json={"prompt": ""})
    engine.status = "restarting"
    await client.post("/v1/completions", json={"prompt": "abc"})
    found = await figures(client)
    refused = {name: value for name, value in found.items() if name.startswith("requests_refused_total")}
    assert refused == {'requests_refused_total{status="429"}': 1, 'requests_refused_total{status="503"}': 1}
    assert (found['engine_status{status="restarting"}'], found['engine_status{status="ready"}']) == (1, 0)
    assert (found["engine_restarts"], found["num_prompt_tokens_waiting"]) == (2, 9)


async def test_two_metrics_do_not_meet(metrics):
    assert metrics.registry is not Metrics().registry
