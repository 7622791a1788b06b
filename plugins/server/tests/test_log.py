"""The server's log: lines of requests, of the start and of the throughput, as text and as JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm.events import LoadEvent
from toolkit_lm_server.app import create_app
from toolkit_lm_server.log import ACCESS, JsonFormat, TextFormat, announce, configure, fields
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.report import Throughput, as_size, report_start, summary
from toolkit_lm_server.request_log import REASON, RequestLog, reason_of

pytestmark = pytest.mark.anyio
LOAD = LoadEvent(time=0, num_running=3, num_waiting=2, num_used_blocks=1, num_total_blocks=4)


@pytest.fixture
def app():
    app = FastAPI()

    @app.get("/items/{name:path}")
    async def item(name: str):
        if name == "wrong":
            return JSONResponse(
                {"error": {"message": 'no\r\nline "here" \x1b\u2028' + "x" * 999}}, 400
            )
        return PlainTextResponse("busy", 503) if name == "busy" else name

    @app.get("/health")
    async def health():
        return JSONResponse({}, 503)

    return app


@pytest.fixture
def lines(caplog):
    caplog.set_level("INFO")
    return lambda: [
        (one.levelname, one.getMessage()) for one in caplog.records if one.name == ACCESS
    ]


async def ask(app, *paths: str) -> list[httpx.Response]:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app, client=("1.2.3.4", 5)), base_url="http://test"
    ) as client:
        return [await client.get(path) for path in paths]


async def test_a_line_for_each_request(app, lines):
    await ask(RequestLog(app, Metrics()), "/items/a%20b?key=secret", "/nothing")
    (first, second) = lines()
    assert re.fullmatch(r'1\.2\.3\.4:5 "GET /items/a%20b HTTP/1\.1" 200 \d\.\d{3} s', first[1])
    assert re.fullmatch(
        r'1\.2\.3\.4:5 "GET /nothing HTTP/1\.1" 404 \d\.\d{3} s "Not Found"', second[1]
    )


async def test_a_line_has_the_id_of_its_answer(engine, lines):
    """The server's own, or the client's where that is a plain word."""
    served = RequestLog(create_app(engine), Metrics())
    transport = httpx.ASGITransport(served)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for number, sent in enumerate(({}, {"x-request-id": "mine-7"})):
            answer = await client.get("/v1/models/none", headers=sent)
            [*_, (_, line)] = lines()
            name = answer.headers["x-request-id"]
            assert f' s id={name} "' in line and len(lines()) == number + 1
    assert name == "mine-7"


async def test_polls_have_no_line(app, lines):
    await ask(
        RequestLog(app, Metrics()), "/health", "/metrics", "/ready", "/live", "/ping", "/load"
    )
    assert lines() == []


async def test_without_the_access_log_failures_have_lines(app, lines):
    await ask(RequestLog(app, Metrics(), all_requests=False), "/items/a", "/items/busy", "/nothing")
    assert [(level, message.split()[4]) for level, message in lines()] == [
        ("WARNING", "503"),
        ("INFO", "404"),
    ]


async def test_a_reason_is_short_and_ends_no_line(app, lines):
    await ask(RequestLog(app, Metrics()), "/items/wrong")
    [(_, line)] = lines()
    reason = line.partition(" s ")[2]
    assert reason.startswith(r'"no\r\nline \"here\" \u001b\u2028xxx') and len(reason) < 250
    assert line.isascii() and line.isprintable()


async def test_a_stream_that_fails_after_its_start_has_a_reason(lines):
    async def app(scope, receive, send):
        scope[REASON] = "it broke"
        await PlainTextResponse("a")(scope, receive, send)

    await ask(RequestLog(app, Metrics(), all_requests=False), "/")
    [(_, line)] = lines()
    assert line.endswith('"it broke"')


async def test_what_an_app_raises_is_an_answer(lines):
    async def app(scope, receive, send):
        raise RuntimeError("secret")

    [response] = await ask(RequestLog(app, Metrics()), "/")
    assert (response.status_code, response.json()["error"]["code"], "secret" in response.text) == (
        500,
        "internal_error",
        False,
    )
    assert lines()[-1][0] == "WARNING"


async def test_a_client_that_leaves_has_a_line(lines):
    async def app(scope, receive, send):
        await asyncio.Event().wait()

    task = asyncio.create_task(ask(RequestLog(app, Metrics()), "/"))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    [(_, line)] = lines()
    assert " 499 " in line


async def test_requests_are_counted_by_the_template_of_their_route(app):
    metrics = Metrics()
    await ask(
        RequestLog(app, metrics),
        *(f"/items/{number}" for number in range(20)),
        *(f"/{number}" for number in range(20)),
    )
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(RequestLog(app, metrics)), base_url="http://test"
    ) as client:
        for number in range(5):
            await client.request(f"ODD{number}", "/items/a")
    found = sorted(
        line
        for line in metrics.text().decode().splitlines()
        if line.startswith("http_requests_total")
    )
    assert found == [
        'http_requests_total{handler="/items/{name:path}",method="GET",status="2xx"} 20.0',
        'http_requests_total{handler="/items/{name:path}",method="other",status="4xx"} 5.0',
        'http_requests_total{handler="none",method="GET",status="4xx"} 20.0',
    ]
    assert (
        'http_request_duration_seconds_count{handler="none",method="GET"} 20.0'
        in metrics.text().decode()
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"error":{"message":"a"}}', "a"),
        (b'{"type":"error","error":{"type":"x","message":"b"}}', "b"),
        (b'{"error":"c"}', "c"),
        (b'{"message":"d"}', "d"),
        (b'{"status":"dead","reason":"e"}', "e"),
        (b'{"error":[1]}', ""),
        (b"[1]", ""),
        (b"\xff", ""),
        (b"", ""),
    ],
)
def test_reasons(body, reason):
    assert reason_of(body) == reason


def record(message: str, **more) -> logging.LogRecord:
    return logging.makeLogRecord(
        {
            "name": "n",
            "levelno": 20,
            "levelname": "INFO",
            "msg": message,
            "created": 0.5,
            "msecs": 500,
            **more,
        }
    )


def test_lines_of_text():
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.500 INFO a b", TextFormat().format(record("a b"))
    )


def test_lines_of_json():
    line = JsonFormat().format(record("a\nb", **fields(status=200, key=None)))
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.500+00:00",
        "level": "info",
        "logger": "n",
        "message": "a\nb",
        "status": 200,
    }
    try:
        raise ValueError("why")
    except ValueError as error:
        line = JsonFormat().format(record("x", exc_info=(type(error), error, error.__traceback__)))
    assert "\n" not in line and json.loads(line)["traceback"].endswith("ValueError: why")


def test_the_line_that_says_where(capsys):
    for form in ("text", "json"):
        announce("Serving tiny at x", ServerOptions(log_format=form))
    text, line = capsys.readouterr().out.splitlines()
    assert (text, json.loads(line)["message"], json.loads(line)["level"]) == (
        "Serving tiny at x",
        "Serving tiny at x",
        "info",
    )


@pytest.fixture
def untouched():
    """The loggers of this process, as they are again at the end."""
    loggers = [logging.getLogger(name) for name in (None, ACCESS, "uvicorn", "toolkit_lm_server")]
    kept = [(one.handlers, one.level, one.propagate) for one in loggers]
    yield
    for one, (handlers, level, propagate) in zip(loggers, kept, strict=True):
        one.handlers = handlers
        one.propagate = propagate
        one.setLevel(level)


def test_requests_go_to_stdout_and_all_else_to_stderr(untouched, capsys):
    configure(ServerOptions(log_format="json"))
    logging.getLogger(ACCESS).info("a")
    logging.getLogger("toolkit_lm_server.errors").info("b")
    logging.getLogger("uvicorn.error").info("c")
    logging.getLogger("other").info("d")
    logging.getLogger("other").warning("e")
    out, err = capsys.readouterr()
    assert [json.loads(line)["message"] for line in out.splitlines()] == ["a"]
    assert [json.loads(line)["message"] for line in err.splitlines()] == ["b", "c", "e"]


def test_the_level_is_for_own_lines(untouched, capsys):
    configure(ServerOptions(log_level="error"))
    for name in (ACCESS, "toolkit_lm_server.report", "uvicorn.error", "other"):
        logging.getLogger(name).warning("a")
    assert capsys.readouterr() == ("", "")


def test_throughput(caplog):
    caplog.set_level("INFO", "toolkit_lm_server.report")
    metrics = Metrics()
    one = Throughput(metrics, seconds=0)
    one.tend()
    assert not caplog.records
    metrics.loads[0] = LOAD
    metrics.totals.prompt = 100
    metrics.totals.cached = 25
    metrics.totals.output = 50
    metrics.recent.first.extend([(0.01, 1), (0.02, 1), (0.4, 1)])
    metrics.recent.between.extend([(0.001, 98), (0.002, 1), (0.5, 1)])
    one.tend()
    [line] = caplog.records
    assert re.fullmatch(
        r"[\d.]+ prompt tokens/s, [\d.]+ output tokens/s; 3 sequences running, 2 requests waiting; "
        r"KV cache 25\.0% used, prefix cache hits 25\.0%; first token p50 20\.0 ms, p99 400\.0 ms; "
        r"between tokens p50 1\.0 ms, p99 2\.0 ms",
        line.getMessage(),
    )
    told = {name: value for name, value in line.fields.items() if name.endswith("_seconds")}
    assert told == {
        "time_to_first_token_p50_seconds": 0.02,
        "time_to_first_token_p99_seconds": 0.4,
        "inter_token_latency_p50_seconds": 0.001,
        "inter_token_latency_p99_seconds": 0.002,
    }
    assert (line.fields["num_running"], line.fields["prefix_cache_hit_rate"]) == (3, 0.25)
    metrics.loads[0] = LoadEvent(
        time=0, num_running=0, num_waiting=0, num_used_blocks=0, num_total_blocks=4
    )
    one.tend()
    assert len(caplog.records) == 1
    Throughput(metrics).tend()
    assert len(caplog.records) == 1
    # Latencies of the line before are not repeated.
    metrics.totals.output = 60
    one.tend()
    assert caplog.records[-1].getMessage().endswith("prefix cache hits 0.0%")


async def test_the_start_is_summed_up(caplog):
    caplog.set_level("INFO", "toolkit_lm_server.report")
    config = VllmConfig.make(
        model="tiny",
        served_model_name=["one", "two"],
        dtype="float32",
        device="cpu",
        num_kv_blocks=64,
        block_size=16,
    )
    async with AsyncLLM(config) as engine:
        report_start(engine, 2.5)
        model, weights, cache, attention, plugins = summary(engine)
    assert model == "Model one, two: LlamaForCausalLM, float32 on cpu, 512 tokens of context"
    assert re.fullmatch(r"Weights: 3\.\d MiB of files \(safetensors\), quantization none", weights)
    # Each token of a sequence has a place in each of the KV groups.
    assert re.fullmatch(
        r"KV cache: [\d,]+ tokens in \d+\.\d [KM]iB, [\d.]+ requests of the longest context at a "
        r"time",
        cache,
    )
    assert re.fullmatch(r"Attention: (cpu|sdpa); scheduling: \w+", attention)
    assert "server" in plugins and "tiny" in plugins
    assert [one.getMessage() for one in caplog.records][:1] == [model]
    assert caplog.records[-1].getMessage() == "Ready after 2.5 s"


def test_sizes():
    assert [as_size(size) for size in (0, 1023, 1536, 5 * 2**30, 3000 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
        "3000.0 TiB",
    ]


INTERRUPTED = """
import faulthandler, os, signal, sys
from toolkit_lm_server.standard_streams import _Writer

faulthandler.dump_traceback_later(60, exit=True)
writer = _Writer(os.open(os.devnull, os.O_WRONLY))
interrupts = 0

def interrupt(*_):
    global interrupts
    interrupts += 1
    writer.write("a line of an interrupt")

signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
while interrupts < 2000:
    writer.write("a line")
signal.setitimer(signal.ITIMER_REAL, 0)
print(interrupts)
"""
"""A signal handler runs between any two steps of its thread, as a finalizer does."""


def test_a_line_may_interrupt_a_line():
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 2000
