"""Large answers: what they hold up, and what is made once for all their choices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from toolkit_lm_server import completions
from toolkit_lm_server.app import create_app

COMPLETE = "/v1/completions"


def test_a_large_answer_leaves_time_to_others():
    """In a process of its own: the tests before leave millions of objects, and one full garbage
    collection holds up any event loop."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(Path(__file__).with_name("large_answers.py")),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout
    assert "2 passed" in ran.stdout


@pytest.mark.anyio
async def test_log_probabilities_of_a_prompt_are_made_once(engine, client_of, monkeypatch):
    """They may be far more than those of its choices."""
    made = []
    make = completions.prompt_logprobs
    monkeypatch.setattr(
        completions, "prompt_logprobs", lambda given: made.append(given) or make(given)
    )
    async with client_of(create_app(engine)) as client:
        reply = (
            await client.post(
                COMPLETE, json={"prompt": ["ab", "cde"], "n": 3, "prompt_logprobs": 2}
            )
        ).json()
    assert len(made) == 2
    assert [len(choice["prompt_logprobs"]) for choice in reply["choices"]] == [2, 2, 2, 3, 3, 3]
