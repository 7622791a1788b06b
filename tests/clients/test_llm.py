"""llm: prompts on the command line, streams, conversations, schemas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ASK = "What is the capital of France?"
PARIS = "The capital of France is Paris."


@pytest.fixture
def run(url, key, tmp_path):
    """run(...): what `llm` writes."""
    entry = f"""
- model_id: small
  model_name: tiny
  api_base: {url}/v1
  api_key_name: small
  supports_schema: true
"""
    (tmp_path / "extra-openai-models.yaml").write_text(entry)
    (tmp_path / "keys.json").write_text(json.dumps({"small": key}))
    command = Path(sys.executable).with_name("llm")

    def run(*arguments: str) -> str:
        environ = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
        return subprocess.run(
            [command, *arguments],
            env=environ,
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout.strip()

    return run


def test_prompts(run):
    assert run("-m", "small", "-o", "temperature", "0", ASK) == PARIS
    assert run("-m", "small", "-o", "temperature", "0", "--no-stream", ASK) == PARIS
    assert run("-c", "-m", "small", "-o", "max_tokens", "4", "And of Italy?")


def test_schemas(run):
    schema = {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    }
    assert list(
        json.loads(
            run("-m", "small", "-o", "temperature", "0", "--schema", json.dumps(schema), ASK)
        )
    ) == ["on"]
