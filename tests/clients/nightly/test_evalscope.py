"""evalscope: `eval` of questions and answers of a file, and `perf` with synthetic texts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import page

PROGRAM = Path(sys.executable).parent / "evalscope"


def run(folder, command, options, *flags):
    """Runs evalscope, which asks no hub, and returns what it prints."""
    pairs = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        [PROGRAM, command, *pairs, *flags],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "MODELSCOPE_OFFLINE": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_questions_and_answers(url, key, tmp_path):
    rows = ""
    for country, city in (("France", "Paris"), ("Italy", "Rome")):
        row = {"query": f"What is the capital of {country}?"}
        rows += json.dumps(row | {"response": f"The capital of {country} is {city}."}) + "\n"
    (tmp_path / "facts.jsonl").write_text(rows)
    where = {"general_qa": {"local_path": str(tmp_path), "subset_list": ["facts"]}}
    options = {
        "model": "tiny",
        "api-url": f"{url}/v1",
        "api-key": key,
        "eval-type": "openai_api",
        "datasets": "general_qa",
        "dataset-args": json.dumps(where),
        "generation-config": json.dumps({"temperature": 0, "max_tokens": 32}),
    }
    run(tmp_path, "eval", options)
    [report] = tmp_path.glob("outputs/*/reports/tiny/general_qa.json")
    metrics = json.loads(report.read_text())["metrics"]
    scores = [one["score"] for one in metrics if one["identity"]["name"] == "rouge"]
    assert len(scores) >= 3 and set(scores) == {1.0}, metrics


def test_speed(url, key, tmp_path):
    options = {
        "url": f"{url}/v1/chat/completions",
        "model": "tiny",
        "api": "openai",
        "api-key": key,
        "parallel": 2,
        "number": 4,
        "dataset": "random",
        "tokenizer-path": page.TINY,
        "min-prompt-length": 16,
        "max-prompt-length": 32,
        "prefix-length": 0,
        "max-tokens": 16,
    }
    printed = run(tmp_path, "perf", options, "--no-test-connection")
    assert "100%" in printed, printed[-2000:]
