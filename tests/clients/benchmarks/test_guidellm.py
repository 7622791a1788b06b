"""guidellm: synthetic texts at `/v1/chat/completions` and `/v1/completions`, one after the other
and several at a time, with streams."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import page
import pytest

PROFILES = {
    "/v1/chat/completions": "kind=synchronous",
    "/v1/completions": "kind=concurrent,streams=3",
}


@pytest.mark.parametrize("path", PROFILES)
def test_synthetic_texts(url, key, tmp_path, path):
    """No request fails, and each gives the tokens that were asked for, as the server counts
    them."""
    command = [
        Path(sys.executable).with_name("guidellm"),
        "run",
        "--disable-console",
        "--profile",
        PROFILES[path],
    ]
    command += [
        "--backend",
        f"kind=openai_http,target={url},model=tiny,api_key={key},request_format={path}",
    ]
    command += [
        "--constraint",
        "kind=max_requests,count=6",
        "--tokenizer",
        f"kind=hf_auto,model={page.TINY}",
    ]
    command += [
        "--data",
        "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "--output",
        f"kind=json,path={tmp_path / 'out.json'}",
    ]
    environ = page.environ() | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [benchmark] = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == 6 and not requests["errored"]
    assert {one["output_metrics"]["text_tokens"] for one in requests["successful"]} == {8}
    assert benchmark["metrics"]["inter_token_latency_ms"]["successful"]["mean"] > 0
