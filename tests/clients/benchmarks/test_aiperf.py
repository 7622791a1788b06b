"""aiperf: synthetic texts at the endpoints `chat` and `responses`, several at a time, with
streams."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import page
import pytest


@pytest.mark.parametrize("endpoint", ["chat", "responses"])
def test_synthetic_texts(url, key, tmp_path, endpoint):
    """No request fails, and each gives the tokens that were asked for.

    Of responses aiperf reads usage in `response.completed` alone, and not in the
    `response.incomplete` that ends one at its limit: there it counts the tokens itself, in texts
    that may be cut otherwise.
    """
    counts = ["--use-server-token-count"] if endpoint == "chat" else []
    command = [
        Path(sys.executable).with_name("aiperf"),
        "profile",
        "--model",
        "tiny",
        "--url",
        url,
        "--api-key",
        key,
        "--streaming",
    ]
    command += [
        "--endpoint-type",
        endpoint,
        "--tokenizer",
        page.TINY,
        "--request-count",
        "6",
        "--concurrency",
        "2",
    ]
    command += [
        "--prompt-input-tokens-mean",
        "32",
        "--prompt-output-tokens-mean",
        "8",
        "--extra-inputs",
        "ignore_eos:true",
    ]
    command += [*counts, "--output-artifact-dir", tmp_path, "--ui-type", "none"]
    done = subprocess.run(
        command, env=page.environ(), capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert (
        found["request_count"]["avg"] == 6
        and not found.get("error_request_count")
        and not found.get("error_summary")
    )
    assert found["output_sequence_length"]["avg"] == pytest.approx(8, abs=0 if counts else 2)
    assert found["time_to_first_token"]["count"] == 6
