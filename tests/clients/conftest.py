"""A server of tiny, which chats, and one which embeds, for clients that know nothing of them but
the URL and a key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import page

KEY = "secret"
PYTHON = os.environ.get("TOOLKIT_PYTHON", str(page.ROOT / ".venv" / "bin" / "python"))
"""Python of the environment with the workspace."""
# Clients would request these from other hosts.
os.environ |= {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "COHERE_API_KEY": KEY,
    "ANONYMIZED_TELEMETRY": "False",
}


@contextmanager
def serving(*arguments: str, key: str | None = KEY, model: str | None = "tiny") -> Iterator[str]:
    """The URL of `toolkit serve`, in a process of its own. `key`: None for one without a key.
    `model`: None where `arguments` name several."""
    flags = [
        "--port",
        "0",
        "--device",
        "cpu",
        "--max-num-seqs",
        "8",
        "--no-access-log",
        "--tool-call-parser",
        "hermes",
    ]
    flags += [] if key is None else ["--api-key", key]
    flags += ["--dtype", "float32", "--tokenizer-info"]
    command = [
        PYTHON,
        "-c",
        "from toolkit_lm_cli import main; main()",
        "serve",
        *([] if model is None else [model]),
        *flags,
        *arguments,
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    try:
        line = process.stdout.readline()
        assert line.startswith("Serving ") and " at http://" in line, line
        yield line.split()[-1]
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """URL of a server that chats."""
    with serving() as found:
        yield found


@pytest.fixture(scope="session")
def tools_url() -> Iterator[str]:
    """URL of a server of tiny-tools, which calls tools."""
    with serving(model="tiny-tools") as found:
        yield found


@pytest.fixture(scope="session")
def long_url() -> Iterator[str]:
    """URL of a server of tiny-tools with room for prompts of thousands of tokens. Behind the 512th
    the model has learned nothing, so that grammars alone tell its calls."""
    positions = ("--hf-overrides", '{"max_position_embeddings": 16384}', "--max-model-len", "16384")
    with serving(*positions, model="tiny-tools") as found:
        yield found


@pytest.fixture(scope="session")
def embed_url() -> Iterator[str]:
    """URL of a server that embeds."""
    with serving("--convert", "embed") as found:
        yield found


@pytest.fixture(scope="session")
def keeping_url() -> Iterator[str]:
    """URL of a server that keeps what clients leave with it."""
    with serving("--max-stored-responses", "8") as found:
        yield found


@pytest.fixture(scope="session")
def pool_url(tmp_path_factory) -> Iterator[str]:
    """URL of a server of two models, `chat` and `other`."""
    file = tmp_path_factory.mktemp("pool") / "models.json"
    options = {"num_kv_blocks": 64}
    entries = [
        {"name": name, "checkpoint": page.TINY, "options": options} for name in ("chat", "other")
    ]
    file.write_text(json.dumps({"models": entries}))
    with serving("--models", str(file), "--models-memory", "4GiB", model=None) as found:
        yield found


@pytest.fixture
def key() -> str:
    return KEY
