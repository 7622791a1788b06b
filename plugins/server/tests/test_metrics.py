"""The figures for Prometheus."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from toolkit_lm import LLM, AsyncLLM, SamplingParams
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.engine import EngineState
from toolkit_lm.errors import QueueFullError
from toolkit_lm.events import WAITS, LoadEvent, RequestEvent, StepEvent
from toolkit_lm.frontend import Health
from toolkit_lm.plugin import Plugins
from toolkit_lm_server.app import create_app
from toolkit_lm_server.metric_names import VLLM_NAMES
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
    return parsed(response.text)


def parsed(text: str) -> dict[str, float]:
    """By name, with the labels but for the model's."""
    bare = text.replace('model_name="fake",', "").replace('{model_name="fake"}', "")
    lines = (line.rsplit(" ", 1) for line in bare.splitlines() if not line.startswith("#"))
    return {name.removeprefix("toolkit_lm_"): float(value) for name, value in lines}


async def test_a_requests_life(client, metrics):
    Plugins.load(PluginsConfig(plugins=["server"]), [metrics])
    for kind, time in (("queued", 10.0), ("scheduled", 11.0), ("preempted", 11.5)):
        metrics.toolkit_event(RequestEvent(kind=kind, time=time, **REQUEST))
    metrics.toolkit_event(
        RequestEvent(kind="first_token", time=12.0, num_cached_tokens=4, **REQUEST)
    )
    end = {
        "num_output_tokens": 5,
        "scheduled_time": 11.0,
        "first_token_time": 12.0,
        "finish_reason": "length",
    }
    metrics.toolkit_event(RequestEvent(kind="finished", time=14.0, **REQUEST, **end))
    metrics.toolkit_event(
        StepEvent(
            time=14.0, duration=0.5, num_tokens=8, num_output_tokens=5, num_output_sequences=5
        )
    )
    metrics.toolkit_event(
        StepEvent(
            time=15.0,
            duration=0,
            num_tokens=0,
            num_compilations=2,
            drafts=[(3, 1), (2, 2), (1, 0)],
            drafters=[("mtp", 2, 1), ("ngram", 1, 0), ("mtp", 2, 2)],
        )
    )
    expected = {
        "compilations_after_ready_total": 2,
        "spec_decode_num_drafts_total": 3,
        "spec_decode_num_draft_tokens_total": 6,
        "spec_decode_num_accepted_tokens_total": 3,
        'spec_decode_num_draft_tokens_per_pos_total{position="1"}': 2,
        'spec_decode_num_accepted_tokens_per_pos_total{position="0"}': 2,
        'spec_decode_num_accepted_tokens_per_pos_total{position="1"}': 1,
        'drafter_draft_tokens_total{drafter="mtp",model_name="fake"}': 4,
        'drafter_accepted_tokens_total{drafter="mtp",model_name="fake"}': 3,
        'drafter_accepted_tokens_total{drafter="ngram",model_name="fake"}': 0,
        "preemptions_total": 1,
        "prompt_tokens_total": 7,
        "prefix_cache_queries_total": 7,
        "prefix_cache_hits_total": 4,
        "generation_tokens_total": 5,
        'requests_finished_total{reason="length"}': 1,
        "request_queue_time_seconds_sum": 1,
        "time_to_first_token_seconds_sum": 2,
        "time_per_output_token_seconds_sum": 0.5,
        "e2e_request_latency_seconds_sum": 4,
        "request_prefill_time_seconds_sum": 1,
        "request_decode_time_seconds_sum": 2,
        "request_inference_time_seconds_sum": 3,
        "request_prompt_tokens_sum": 7,
        "request_generation_tokens_sum": 5,
        "request_sequences_sum": 1,
        "request_preemptions_sum": 1,
        "step_duration_seconds_sum": 0.5,
        "step_tokens_sum": 8,
    }
    found = await figures(client)
    assert {name: found[name] for name in expected} == expected


async def test_the_tokens_that_requests_allow(client):
    """Each prompt counts, and none whose request leaves it to the context."""
    talk = {"messages": [{"role": "user", "content": "hi"}]}
    for path, body in (
        ("completions", {"prompt": ["a", "b"], "max_tokens": 3}),
        ("chat/completions", talk),
    ):
        assert (await client.post(f"/v1/{path}", json={"model": "fake", **body})).status_code == 200
    found = await figures(client)
    assert (found["request_max_tokens_count"], found["request_max_tokens_sum"]) == (2, 6)


async def test_pooled_prompts_count(client, metrics):
    texts = ["a text that is longer than two blocks of the cache", "another"]
    with LLM("tiny", convert="embed", enable_prefix_caching=True, plugins=[metrics]) as llm:
        outputs = [*llm.embed(texts, use_tqdm=False), *llm.embed(texts, use_tqdm=False)]
    cached = [output.num_cached_tokens for output in outputs]
    assert cached[2] >= 16 and cached[0] == 0
    expected = {
        "prompt_tokens_total": sum(len(output.prompt_token_ids) for output in outputs),
        "prefix_cache_queries_total": sum(len(output.prompt_token_ids) for output in outputs),
        "prefix_cache_hits_total": sum(cached),
        'requests_finished_total{reason="stop"}': 4,
        "time_to_first_token_seconds_count": 0,
    }
    found = await figures(client)
    assert {name: found[name] for name in expected} == expected


async def test_prompts_that_failed_do_not_count(client, metrics):
    metrics.toolkit_event(
        RequestEvent(kind="finished", time=14.0, finish_reason="error", **REQUEST)
    )
    found = await figures(client)
    assert (found['requests_finished_total{reason="error"}'], found["prompt_tokens_total"]) == (
        1,
        0,
    )


async def test_requests_that_are_ended_from_outside(client, metrics):
    for reason in ("abort", "timeout", "timeout"):
        metrics.toolkit_event(
            RequestEvent(
                kind="aborted", time=14.0, num_output_tokens=2, finish_reason=reason, **REQUEST
            )
        )
    found = await figures(client)
    assert found['requests_aborted_total{reason="abort"}'] == 1
    assert found['requests_aborted_total{reason="timeout"}'] == 2
    assert found["e2e_request_latency_seconds_count"] == 0


async def test_load(client, metrics):
    load = {
        "num_used_blocks": 5,
        "num_total_blocks": 10,
        "num_used_host_blocks": 1,
        "num_total_host_blocks": 4,
    }
    metrics.toolkit_event(LoadEvent(time=14.0, num_running=3, num_waiting=2, **load))
    expected = {
        "num_sequences_running": 3,
        "num_requests_waiting": 2,
        "kv_cache_usage_ratio": 0.5,
        "kv_cache_host_usage_ratio": 0.25,
    }
    found = await figures(client)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("several", [False, True])
def test_the_used_part_of_the_batch(metrics, several):
    """`max_num_seqs` is of each engine."""
    engine = SimpleNamespace(pid=1, num_tokens=0, status="ready")
    watched = SimpleNamespace(
        config=VllmConfig.make(model="tiny", max_num_seqs=4),
        engines=[engine] * 2 if several else [],
        health=lambda: Health("ready"),
        num_restarts=0,
        num_queued_tokens=0,
        served_model_name="fake",
    )

    def told(*running: int) -> list[float]:
        for number, count in enumerate(running):
            load = {"num_waiting": 9, "num_used_blocks": 0, "num_total_blocks": 1}
            metrics.toolkit_event(LoadEvent(time=1.0, num_running=count, engine=number, **load))
        metrics.observe(watched)
        text = metrics.text().decode()
        found = re.findall(r"(?m)^toolkit_lm_batch_usage_ratio{(.*)} (\S+)$", text)
        assert all(("engine=" in labels) == several for labels, _ in found)
        return [float(value) for _, value in found]

    running = [[3, 5], [0, 4]] if several else [[3], [5], [0]]
    expected = [[0.75, 1.0], [0.0, 1.0]] if several else [[0.75], [1.0], [0.0]]
    assert [told(*counts) for counts in running] == expected


def waits(text: str, name: str) -> dict[str, float]:
    """By reason, where any wait."""
    found = re.findall(rf'^{name}{{.*reason="(\w+)".*}} (\S+)$', text, re.MULTILINE)
    return {reason: float(count) for reason, count in found if float(count)}


@pytest.mark.parametrize("reason", WAITS)
def test_those_who_wait_are_told_by_reason(reason):
    """In vLLM's words too: what waits for room in the batch is its "capacity"."""
    load = {"num_running": 1, "num_waiting": 5, "num_used_blocks": 1, "num_total_blocks": 2}
    for prefix in ("toolkit_lm_", "vllm:"):
        metrics = Metrics()
        name = f"{prefix}num_requests_waiting_by_reason"
        metrics.toolkit_event(LoadEvent(time=1, waiting_by_reason={reason: 3, "queue": 2}, **load))
        told = waits(metrics.text().decode(), name)
        assert sum(told.values()) == (2 if reason == "queue" else 5)
        if prefix == "vllm:":
            assert set(told) <= {"capacity", "deferred"}
        metrics.toolkit_event(LoadEvent(time=2, **load | {"num_waiting": 0}))
        assert not waits(metrics.text().decode(), name)


async def test_figures_of_several_engines_say_of_which_they_are(client, engine, metrics):
    engine.engines = [
        EngineState("ready", "", os.getpid(), 1, 40),
        EngineState("restarting", "importing", os.getpid()),
    ]
    load = {"num_used_blocks": 5, "num_total_blocks": 10}
    for number in (0, 1):
        metrics.toolkit_event(RequestEvent(kind="first_token", time=12.0, engine=number, **REQUEST))
        metrics.toolkit_event(
            StepEvent(
                time=14.0, duration=0.5, num_tokens=8, num_output_tokens=5 + number, engine=number
            )
        )
        metrics.toolkit_event(
            LoadEvent(time=14.0, num_running=3 + number, num_waiting=2, engine=number, **load)
        )
    assert (metrics.load.num_running, metrics.load.num_total_blocks) == (7, 20)
    found = await figures(client)
    for number in (0, 1):
        its = {
            name.partition("{")[0]: value
            for name, value in found.items()
            if f'engine="{number}"' in name
        }
        expected = {
            "num_sequences_running": 3 + number,
            "kv_cache_usage_ratio": 0.5,
            "generation_tokens_total": 5 + number,
        }
        expected |= {
            "prompt_tokens_total": 7,
            "engine_ready": 1 - number,
            "engine_tokens_in_flight": 40 - 40 * number,
        }
        assert expected.items() <= its.items()
        assert its["engine_process_resident_memory_bytes"] > 0
    # Figures that no single engine has.
    assert found["time_to_first_token_seconds_count"] == 2


def test_the_time_between_the_tokens_of_each_engine(metrics):
    """Another's step does not come between."""
    for time in (1.0, 2.0, 3.0):
        for number in (0, 1):
            at = time + 0.5 * number
            metrics.toolkit_event(
                StepEvent(
                    time=at,
                    duration=0.5,
                    num_tokens=1,
                    num_output_tokens=1,
                    num_output_sequences=1,
                    engine=number,
                )
            )
            if time == 1.0:
                metrics.toolkit_event(
                    RequestEvent(kind="first_token", time=at, engine=number, **REQUEST)
                )
            metrics.toolkit_event(
                LoadEvent(
                    time=at,
                    num_running=1,
                    num_waiting=0,
                    num_used_blocks=1,
                    num_total_blocks=9,
                    engine=number,
                )
            )
    found = parsed(metrics.text().decode())
    name = "inter_token_latency_seconds"
    [count, total] = [
        value for one, value in found.items() if one.startswith((f"{name}_count", f"{name}_sum"))
    ]
    assert (count, total) == (4, 4.0)


async def test_refusals_and_the_engines_status(client, engine):
    engine.failure = QueueFullError("the engine is busy", 1.0)
    await client.post("/v1/completions", json={"prompt": "abc"})
    await client.post("/v1/completions", json={"prompt": ""})
    engine.status = "restarting"
    await client.post("/v1/completions", json={"prompt": "abc"})
    found = await figures(client)
    refused = {
        name: value for name, value in found.items() if name.startswith("requests_refused_total")
    }
    assert refused == {
        'requests_refused_total{status="429"}': 1,
        'requests_refused_total{status="503"}': 1,
    }
    assert (
        found['engine_status{status="restarting"}'],
        found['engine_status{status="ready"}'],
    ) == (1, 0)
    assert (found["engine_restarts_total"], found["num_prompt_tokens_waiting"]) == (2, 9)


def test_the_time_between_tokens(metrics):
    """First tokens follow none, and of accepted drafts several come at a time."""
    load = LoadEvent(time=0, num_running=1, num_waiting=0, num_used_blocks=0, num_total_blocks=1)
    first = RequestEvent(kind="first_token", time=5.0, num_sequences=2, **REQUEST)
    for step, *others in (
        ((5.0, 2, 2), first),
        ((5.5, 3, 3), RequestEvent(kind="first_token", time=5.5, **REQUEST)),
        ((5.6, 0, 0),),
        ((6.6, 8, 4),),
    ):
        time, tokens, sequences = step
        event = StepEvent(
            time=time,
            duration=0.1,
            num_tokens=9,
            num_output_tokens=tokens,
            num_output_sequences=sequences,
        )
        for one in (event, *others, load):
            metrics.toolkit_event(one)
    found = parsed(metrics.text().decode().replace('{model_name=""}', ""))
    assert found["inter_token_latency_seconds_count"] == 2 + 8
    assert found["inter_token_latency_seconds_sum"] == pytest.approx(2 * 0.5 + 8 * 0.5)
    assert found["generation_tokens_total"] == 13


def test_the_time_between_an_engines_tokens(metrics):
    with LLM("tiny", plugins=[metrics]) as llm:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        llm.generate(["Once upon", "a time"], params, use_tqdm=False)
    found = parsed(metrics.text().decode().replace('{model_name=""}', ""))
    assert (found["generation_tokens_total"], found["inter_token_latency_seconds_count"]) == (
        12,
        10,
    )
    lengths = [found[f"request_{side}_tokens_count"] for side in ("prompt", "generation")]
    assert (lengths, found["request_generation_tokens_sum"]) == ([2, 2], 12)


def names(metrics: Metrics) -> dict[str, str]:
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", metrics.text().decode(), re.MULTILINE))


def test_the_names_of_vllm(metrics):
    """All that it has and we can tell, beside ours."""
    told = names(metrics)
    others = {name for name in told if name.startswith("vllm:")}
    kinds = [kind for name, kind in told.items() if name.startswith("vllm:")]
    ours = [told[name] for other, name in pairwise(told) if other.startswith("vllm:")]
    assert kinds == ours
    assert others == {
        "vllm:num_requests_waiting_by_reason",
        "vllm:request_params_n",
        "vllm:request_params_max_tokens",
        "vllm:request_num_preemptions",
        "vllm:cache_config_info",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:mm_cache_hits_total",
        "vllm:mm_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_draft_tokens_per_pos_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "vllm:request_success_total",
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
        "vllm:iteration_tokens_total",
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:request_time_per_output_token_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
        "vllm:request_inference_time_seconds",
    }
    assert len(VLLM_NAMES) == 34


async def test_the_labels_of_vllm(engine, client_of):
    metrics = Metrics()
    metrics.toolkit_event(RequestEvent(kind="finished", time=14.0, finish_reason="stop", **REQUEST))
    async with client_of(create_app(engine, metrics=metrics)) as client:
        text = (await client.get("/metrics")).text
    assert (
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="fake"} 1.0'
        in text
    )
    assert 'vllm:num_requests_running{engine="0",model_name="fake"} 0.0' in text
    assert (
        'vllm:e2e_request_latency_seconds_bucket{engine="0",le="5.0",model_name="fake"} 1.0' in text
    )
    assert 'toolkit_lm_engine_status{model_name="fake",status="ready"} 1.0' in text


def test_the_page_names_what_endpoint_pickers_ask_for(metrics):
    text = (Path(__file__).parents[3] / "docs" / "observability.md").read_text()
    section = text.partition("### Gateways' endpoint pickers")[2].partition("\n### ")[0]
    rows = re.findall(r"(?m)^\| .* \| (\w+).* \| `(vllm:\w+)`(.*) \|$", section)
    told = names(metrics)
    # Adapters are told by a plugin, whose tests look at the labels.
    kinds = [(told.get(name, "gauge"), name in told) for _, name, _ in rows]
    assert kinds == [("gauge", True)] * 4 + [("gauge", False)]
    assert rows[4][1] == "vllm:lora_requests_info" and "lora_requests_info" in VLLM_NAMES
    labels = re.findall(r"`(\w+)`", rows[3][2])
    renamed = {**VLLM_NAMES["kv_cache_info"].labels, "block_size": "block_size"}
    assert set(labels) <= set(renamed.values()) and rows[3][1] == "vllm:cache_config_info"
    for sample in re.findall(r"(?m)^(vllm:\w+)\{", section):
        assert sample in told


def test_the_page_names_what_vllm_has():
    text = (Path(__file__).parents[3] / "docs" / "observability.md").read_text()
    rows = dict(re.findall(r"^\| `toolkit_lm_(\w+)` \| `(vllm:\w+)` \|$", text, re.MULTILINE))
    # vLLM's name of a metric stands before ours.
    told = list(names(Metrics()))
    assert rows == {
        ours.removeprefix("toolkit_lm_"): theirs
        for theirs, ours in pairwise(told)
        if theirs.startswith("vllm:")
    }


def test_processes(metrics):
    command = [sys.executable, "-c", "print(flush=True); input()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        process.stdout.readline()
        # The memory of a stopped process is the same at two readings.
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        metrics.observe(
            SimpleNamespace(
                health=lambda: Health("ready"),
                num_restarts=0,
                num_queued_tokens=0,
                engine=engine_of(process.pid),
            )
        )
        found = parsed(metrics.text().decode())
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        process.kill()
    assert found["engine_process_resident_memory_bytes"] == int(fields[21]) * resource.getpagesize()
    assert found["process_resident_memory_bytes"] > 0
    metrics.observe(
        SimpleNamespace(
            health=lambda: Health("dead"),
            num_restarts=0,
            num_queued_tokens=0,
            engine=engine_of(None),
        )
    )
    assert not [
        name for name in parsed(metrics.text().decode()) if name.startswith("engine_process")
    ]


def engine_of(pid: int | None) -> SimpleNamespace:
    return SimpleNamespace(client=SimpleNamespace(process=SimpleNamespace(pid=pid)))


async def test_two_metrics_do_not_meet(metrics):
    assert metrics.registry is not Metrics().registry


async def test_an_engine_that_starts_has_figures(metrics):
    """They are asked for while it loads: it has no KV cache yet."""
    async with AsyncLLM(VllmConfig.make(model="tiny", engine_process=True), wait=False) as llm:
        metrics.observe(llm)
        found = parsed(metrics.text().decode())
    assert [
        value
        for name, value in found.items()
        if "engine_status{" in name and 'status="ready"' in name
    ] == [0]


async def test_restarts_are_counted(client, engine, metrics):
    """An engine that was made anew counts from 0; the counter never falls."""
    told = []
    for num_restarts in (2, 2, 0, 1):
        engine.num_restarts = num_restarts
        told.append((await figures(client))["engine_restarts_total"])
    assert told == [2, 2, 2, 3]


async def test_lookups_of_media_are_counted(client, engine, metrics):
    counts = []
    for lookups in ((3, 1), (5, 4), (5, 4)):
        engine.renderer.media_lookups = lookups
        found = await figures(client)
        text = (await client.get("/metrics")).text
        counts.append([found["media_cache_queries_total"], found["media_cache_hits_total"]])
        for name, count in zip(("queries", "hits"), lookups, strict=True):
            [line] = [one for one in text.splitlines() if one.startswith(f"vllm:mm_cache_{name}_t")]
            assert float(line.split()[-1]) == count
    assert counts == [[3, 1], [5, 4], [5, 4]]
