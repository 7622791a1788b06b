"""`toolkit bench serve` and `sweep`, against a scripted server and one of the tiny model."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from math import inf

import pytest
from toolkit_lm_bench.serve import arrivals

SMALL = ["--num-prompts", 4, "--input-len", 5, "--output-len", 3]


@pytest.fixture(scope="module")
def tiny():
    """The address of `toolkit serve tiny`."""
    command = [
        sys.executable,
        "-c",
        "from toolkit_lm_cli import main; main()",
        "serve",
        "tiny",
        "--port",
        "0",
        "--log-level",
        "error",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        yield next(
            at[1] for line in process.stdout if (at := re.search(r"Serving tiny at (\S+)", line))
        )
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def test_a_run_as_json(server, bench, tmp_path):
    file = tmp_path / "out.json"
    code, out, err = bench(
        "serve",
        "--url",
        server.url + "/v1",
        *SMALL,
        "--json",
        "--output",
        file,
        "--goodput",
        "ttft:60000,tpot:60000",
    )
    assert (code, err) == (0, "")
    row = json.loads(out)
    assert row == json.loads(file.read_text())
    assert (row["model"], row["endpoint"], row["request_rate"], row["concurrency"]) == (
        "scripted",
        "completions",
        "inf",
        None,
    )
    assert (
        row["completed"],
        row["failed"],
        row["total_input_tokens"],
        row["total_output_tokens"],
    ) == (4, 0, 20, 12)
    assert row["request_goodput"] == row["request_throughput"]
    assert {"p50_ttft_ms", "p90_tpot_ms", "p99_itl_ms", "mean_e2el_ms"} <= row.keys()
    assert 0 < row["p50_ttft_ms"] <= row["p50_e2el_ms"]
    # One more than is measured: the warm-up.
    assert len(server.asked) == 5
    assert {asked["path"] for asked in server.asked} == {"/v1/completions"}
    assert len({tuple(asked["prompt"]) for asked in server.asked}) == 5
    asked = server.asked[0]
    assert (asked["model"], asked["max_tokens"], asked["temperature"], asked["ignore_eos"]) == (
        "scripted",
        3,
        0.0,
        True,
    )
    assert asked["stream"] and asked["stream_options"] == {"include_usage": True}


def test_a_table_for_people(server, bench):
    code, out, _ = bench(
        "serve",
        "--url",
        server.url,
        *SMALL,
        "--percentiles",
        "25,99.9",
        "--goodput",
        "e2el:60000",
        "--warmup",
        0,
    )
    assert code == 0 and len(server.asked) == 4
    assert all(
        word in out
        for word in (
            "scripted, all at once",
            "good requests per second",
            "p25",
            "p99.9",
            "TTFT",
            "TPOT",
            "ITL",
            "E2EL",
        )
    )


def test_chat_and_options_of_the_request(server, bench):
    flags = [
        "--endpoint",
        "chat",
        "--no-ignore-eos",
        "--temperature",
        "none",
        "--model",
        "mine",
        "--api-key",
        "sesame",
    ]
    assert bench("serve", "--url", server.url, *SMALL, *flags)[0] == 0
    asked = server.asked[-1]
    assert (
        asked["path"] == "/v1/chat/completions"
        and asked["model"] == "mine"
        and {"temperature", "ignore_eos"}.isdisjoint(asked)
    )
    [message] = asked["messages"]
    assert message["role"] == "user" and len(message["content"].split()) == 5
    assert {headers["authorization"] for headers in server.headers} == {"Bearer sesame"}


def test_concurrency_bounds_what_is_under_way(server, bench):
    code, out, _ = bench(
        "serve",
        "--url",
        server.url,
        "--num-prompts",
        12,
        "--output-len",
        4,
        "--concurrency",
        3,
        "--json",
    )
    assert code == 0 and json.loads(out)["concurrency"] == 3
    assert server.most_under_way <= 3
    # Connections are used again.
    assert server.num_connections <= 4


def test_all_at_once_does_not_wait_for_answers(server, bench):
    server.gate.clear()

    def open_the_gate():
        deadline = time.monotonic() + 20
        while server.under_way < 6 and time.monotonic() < deadline:
            time.sleep(0.01)
        server.gate.set()

    helper = threading.Thread(target=open_the_gate)
    helper.start()
    code, *_ = bench(
        "serve", "--url", server.url, "--num-prompts", 6, "--output-len", 2, "--warmup", 0
    )
    helper.join()
    assert (code, server.most_under_way) == (0, 6)


def test_arrivals_have_the_rate():
    assert arrivals(3, inf, random.Random(0)) == [0, 0, 0]
    found = arrivals(20_001, 50, random.Random(0))
    assert found[0] == 0 and found == sorted(found)
    assert found[-1] == pytest.approx(20_000 / 50, rel=0.02)
    assert found == arrivals(20_001, 50, random.Random(0))


def test_a_rate(server, bench):
    code, out, _ = bench("serve", "--url", server.url, *SMALL, "--request-rate", 500, "--json")
    assert code == 0 and json.loads(out)["request_rate"] == 500


def test_a_conversation_waits_for_its_answers(server, bench, tmp_path):
    file = tmp_path / "talks.jsonl"
    said = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q1"},
        {"role": "user", "content": "q2"},
    ]
    file.write_text(json.dumps({"messages": said}))
    flags = [
        "--dataset",
        "conversation",
        "--dataset-path",
        file,
        "--num-prompts",
        1,
        "--output-len",
        2,
        "--warmup",
        0,
    ]
    code, out, _ = bench("serve", "--url", server.url, *flags, "--json")
    assert code == 0 and json.loads(out)["completed"] == 2
    first, second = (asked["messages"] for asked in server.asked)
    assert first == said[:2]
    assert second == [*said[:2], {"role": "assistant", "content": " a0w0 a0w1"}, said[2]]


def test_a_conversation_ends_with_its_first_failure(server, bench, tmp_path):
    file = tmp_path / "talks.jsonl"
    file.write_text(json.dumps([{"role": "user", "content": "q"}] * 3))
    server.refuse = lambda number: (
        (500, {"error": {"message": "out of luck"}}) if number == 1 else None
    )
    flags = ["--dataset", "conversation", "--dataset-path", file, "--num-prompts", 1, "--warmup", 0]
    code, out, _ = bench("serve", "--url", server.url, *flags, "--json")
    row = json.loads(out)
    assert (code, row["completed"], row["failed"], row["first_error"]) == (
        0,
        1,
        1,
        "500: out of luck",
    )


def test_failures_are_counted_and_the_first_is_told(server, bench):
    server.refuse = lambda number: (
        (503, {"error": {"message": f"full at {number}"}}) if number in (2, 3) else None
    )
    code, out, err = bench("serve", "--url", server.url, *SMALL, "--concurrency", 1, "--json")
    row = json.loads(out)
    assert (code, row["completed"], row["failed"], row["total_output_tokens"]) == (0, 2, 2, 6)
    assert err == "error: 2 requests failed, the first with: 503: full at 2\n"


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        ((400, {"error": {"message": "no such token"}}), "400: no such token"),
        ((422, {"detail": "wrong"}), '422: {"detail": "wrong"}'),
        ((500, b""), "500: no reason given"),
        ((200, {"choices": []}), "the server does not stream: its answer is application/json"),
    ],
)
def test_when_all_fail_the_exit_code_is_1(server, bench, refusal, reason):
    server.refuse = lambda number: refusal
    code, out, err = bench("serve", "--url", server.url, *SMALL)
    assert code == 1 and f"4 requests failed, the first with: {reason}" in err and "TTFT" not in out


def test_a_stream_that_breaks_off_is_a_failure(server, bench):
    server.events = [b'data: {"choices": [{"text": "a"}]}\n\n']
    code, _, err = bench("serve", "--url", server.url, *SMALL)
    assert code == 1 and "the answer broke off before its end" in err


def test_a_request_that_takes_too_long_is_a_failure(server, bench):
    server.gate.clear()
    code, _, err = bench(
        "serve", "--url", server.url, "--num-prompts", 2, "--timeout", "0.2", "--warmup", 0
    )
    assert code == 1 and "no end after 0.2 s" in err


def test_without_usage_tokens_are_counted_and_that_is_said(server, bench):
    server.has_usage = False
    code, out, err = bench("serve", "--url", server.url, *SMALL, "--json")
    row = json.loads(out)
    assert (code, row["counted"], row["total_input_tokens"], row["total_output_tokens"]) == (
        0,
        4,
        20,
        12,
    )
    assert "note: the server reported no usage for 4 requests." in err


@pytest.mark.parametrize("command", ["serve", "sweep"])
@pytest.mark.parametrize(
    ("card", "below"),
    [
        ({"vocab_size": 40}, 40),
        ({"meta": {"n_vocab": 50}}, 50),
        ({"vocab_size": 5000}, 100),
        ({"vocab_size": None, "meta": None}, 100),
        ({"vocab_size": "many"}, 100),
        ({}, 100),
    ],
)
def test_prompts_are_of_the_models_vocabulary(server, bench, command, card, below):
    server.models = [{"id": "other", "vocab_size": 11}, {"id": "mine", **card}]
    load = ["--concurrencies", "4"] if command == "sweep" else []
    flags = ["--vocab-size", 100, "--num-prompts", 8, "--output-len", 1, "--model", "mine"]
    code, _, err = bench(command, "--url", server.url, *flags, *load)
    assert code == 0, err
    sent = [token_id for asked in server.asked for token_id in asked["prompt"]]
    assert below // 2 < max(sent) < below


def test_a_server_without_models(server, bench):
    server.models = []
    code, _, err = bench("serve", "--url", server.url, *SMALL)
    assert code == 1 and "/v1/models gives no list of models. Name one with --model." in err


def test_nobody_answers(server, bench):
    server.shutdown()
    server.server_close()
    code, _, err = bench("serve", "--url", server.url, *SMALL)
    assert (
        code == 1 and f"no answer from the server at {server.url}" in err and "Traceback" not in err
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--url", "nowhere"], "'nowhere' is not the address of a server"),
        (
            ["serve", "--request-rate", "fast"],
            "'fast' is not a number of requests per second above 0, or inf",
        ),
        (["serve", "--request-rate", "0"], "--request-rate: '0'"),
        (["serve", "--concurrency", "0"], "'0' is not a number of requests, at least 1"),
        (["serve", "--goodput", "ttf:3"], "Did you mean 'ttft'?"),
        (["serve", "--goodput", "ttft"], "needs milliseconds above 0, as in ttft:200"),
        (["serve", "--percentiles", "101"], "101 is not between 0 and 100"),
        (["serve", "--percentiles", ","], "--percentiles is empty"),
        (["serve", "--dataset", "sharegtp"], "Did you mean 'sharegpt'?"),
        (
            ["serve", "--dataset", "conversation", "--endpoint", "completions"],
            "'conversation' is for chat",
        ),
        (["serve", "--dataset", "sharegpt"], "'sharegpt' needs a file"),
        (["serve", "--output", "/nowhere/x.json"], "'/nowhere/x.json' cannot be written"),
        (["serve", "--api-key", "ä"], "--api-key must be printable ASCII"),
        (["sweep"], "give either --concurrencies or --request-rates"),
        (["sweep", "--concurrencies", "1,x"], "--concurrencies: 'x'"),
        (["sweep", "--request-rates", "1,-2"], "--request-rates: '-2'"),
        (["sweep", "--concurrencies", "1", "--plot", "x.gif"], "must end in .png"),
        (
            ["throughput", "tiny", "--dataset", "conversation"],
            "it is for `toolkit bench serve` and `sweep`",
        ),
    ],
    ids=lambda x: " ".join(x)[:50] if isinstance(x, list) else "",
)
def test_bad_input_is_one_error(bench, arguments, message):
    code, out, err = bench(*arguments)
    assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1


def test_a_sweep(server, bench, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "sweep.json"
    picture = tmp_path / "sweep.png"
    flags = [
        "--concurrencies",
        "1,2,4",
        "--output",
        file,
        "--plot",
        picture,
        "--goodput",
        "ttft:60000",
    ]
    code, out, _ = bench("sweep", "--url", server.url, *SMALL, *flags)
    assert code == 0
    row = json.loads(file.read_text())
    assert [point["concurrency"] for point in row["points"]] == [1, 2, 4]
    assert [point["completed"] for point in row["points"]] == [4, 4, 4]
    assert all(word in out for word in ("scripted", "concurrency 4", "good/s", "TTFT p99, ms"))
    assert picture.read_bytes().startswith(b"\x89PNG")
    # No prompt is in a prefix cache.
    assert len({tuple(asked["prompt"]) for asked in server.asked}) == len(server.asked) == 15


def test_a_sweep_of_rates_with_a_load_that_fails(server, bench):
    server.refuse = lambda number: (500, {"error": "no"}) if number >= 4 else None
    code, out, err = bench(
        "sweep", "--url", server.url, *SMALL, "--request-rates", "500,inf", "--warmup", 0, "--json"
    )
    assert code == 0 and [point["failed"] for point in json.loads(out)["points"]] == [0, 4]
    assert "4 requests failed" in err


def test_a_sweep_that_breaks_off_keeps_what_it_has(server, bench, tmp_path):
    def stop(number):
        server.models = [] if number == 3 else server.models

    server.refuse = stop
    file = tmp_path / "sweep.json"
    code, _, err = bench(
        "sweep",
        "--url",
        server.url,
        *SMALL,
        "--concurrencies",
        "1,2",
        "--warmup",
        0,
        "--output",
        file,
    )
    assert code == 1 and "gives no list of models" in err
    assert [point["completed"] for point in json.loads(file.read_text())["points"]] == [4]


def test_an_idle_connection_that_the_server_has_closed(server, bench):
    server.hangs_up = True
    code, out, _ = bench("serve", "--url", server.url, *SMALL, "--concurrency", 1, "--json")
    assert (code, json.loads(out)["completed"]) == (0, 4)
    assert server.num_connections == 5


def test_a_picture_of_failures_only(server, bench, tmp_path):
    pytest.importorskip("matplotlib")
    server.refuse = lambda number: (500, {"error": "no"})
    code, *_ = bench(
        "sweep", "--url", server.url, *SMALL, "--request-rates", "inf", "--plot", tmp_path / "x.png"
    )
    assert code == 1 and (tmp_path / "x.png").exists()


def test_a_plot_without_matplotlib_names_the_extra(bench, monkeypatch):
    monkeypatch.setattr("toolkit_lm_bench.plot.find_spec", lambda name: None)
    code, _, err = bench("sweep", "--concurrencies", "1", "--plot", "x.png")
    assert code == 2 and "pip install 'toolkit-lm-bench[plot]'" in err


def test_a_real_server(tiny, bench):
    code, out, err = bench("serve", "--url", tiny, *SMALL, "--concurrency", 2, "--json")
    row = json.loads(out)
    assert (code, err) == (0, "")
    assert (
        row["model"],
        row["completed"],
        row["total_input_tokens"],
        row["total_output_tokens"],
    ) == ("tiny", 4, 20, 12)
    assert row["counted"] == 0
    code, out, _ = bench("serve", "--url", tiny, *SMALL, "--endpoint", "chat", "--json")
    assert (code, json.loads(out)["total_output_tokens"]) == (0, 12)
