"""`toolkit bench throughput` and `latency`, with the tiny model; and what the commands import."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SMALL = ["--input-len", 5, "--output-len", 3, "--warmup", 0, "--max-model-len", 64]


def test_throughput(bench, tmp_path):
    code, out, err = bench(
        "throughput",
        "tiny",
        *SMALL,
        "--num-prompts",
        4,
        "--repeats",
        3,
        "--json",
        "--output",
        tmp_path / "x.json",
    )
    assert code == 0, err
    row = json.loads(out)
    assert row == json.loads((tmp_path / "x.json").read_text())
    assert (
        row["model"],
        row["num_requests"],
        row["num_prompt_tokens"],
        row["num_output_tokens"],
    ) == ("tiny", 4, 20, 12)
    assert row["elapsed_time"] == sorted(row["elapsed_times"])[1]
    assert row["output_tokens_per_second"] * row["elapsed_time"] == pytest.approx(12)
    assert (
        row["total_tokens_per_second"]
        > row["output_tokens_per_second"]
        > row["requests_per_second"]
        > 0
    )


def test_throughput_of_texts_and_its_table(bench, tmp_path):
    file = tmp_path / "share.json"
    turns = [{"from": "human", "value": "Once upon"}, {"from": "gpt", "value": "a time"}]
    file.write_text(json.dumps([{"conversations": turns}] * 2))
    flags = ["--dataset", "sharegpt", "--dataset-path", file, "--num-prompts", 2, "--repeats", 1]
    code, out, err = bench("throughput", "tiny", *SMALL, *flags)
    assert code == 0, err
    assert "tiny: median of 1 runs" in out and "output tokens per second" in out


def test_throughput_with_drafts(bench):
    """Greedy answers of tiny repeat themselves sooner or later."""
    flags = ["--input-len", 5, "--output-len", 100, "--max-model-len", 128, "--num-prompts", 2]
    flags += ["--warmup", 0, "--repeats", 1, "--temperature", 0, "--ignore-eos"]
    code, out, err = bench(
        "throughput", "tiny", *flags, "--drafter", "ngram", "--draft-budget", "all"
    )
    assert code == 0, err
    assert "accepted drafts per draft of ngram" in out and "output tokens per step" in out
    code, out, err = bench("throughput", "tiny", *flags)
    assert code == 0 and "draft" not in out, err


def test_latency(bench):
    flags = ["--batch-size", 2, "--repeats", 3, "--percentiles", "0,100"]
    code, out, err = bench("latency", "tiny", *SMALL, *flags, "--json")
    assert code == 0, err
    row = json.loads(out)
    assert (row["batch_size"], row["input_len"], row["output_len"], len(row["latencies"])) == (
        2,
        5,
        3,
        3,
    )
    assert row["percentiles"] == {"0": min(row["latencies"]), "100": max(row["latencies"])}
    code, out, _ = bench("latency", "tiny", *SMALL, *flags)
    assert (
        code == 0
        and "tiny, 2 prompts of 5 tokens, 3 output tokens each: seconds of a call, 3 calls" in out
    )


def test_a_prompt_that_does_not_fit_is_one_error(bench):
    code, _, err = bench("latency", "tiny", "--input-len", 100, "--max-model-len", 64)
    assert code == 1 and "64" in err and "Traceback" not in err


def test_the_client_imports_nothing_heavy():
    modules = (
        "toolkit_lm_bench, toolkit_lm_bench.cli, toolkit_lm_bench.report, "
        "toolkit_lm_bench.sweep, toolkit_lm_bench.plot"
    )
    code = (
        f"import sys, {modules}; print({{'torch', 'numpy', 'httpx', 'matplotlib', "
        f"'transformers'}} & set(sys.modules))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "set()\n"
    )
