"""No route holds up the event loop, whatever the length of the prompt.

The routes are those of test_matrix, where a route that is new fails until it has a body. Each body
gets a prompt of 200,000 tokens, as a text and as token ids. The engines admit it.
"""

from __future__ import annotations

import gc
import json
import re
import shutil
import time
from asyncio.events import Handle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import toolkit_lm_tiny
from attacks import BODIES, POOLED, first
from safetensors.torch import load_file, save_file
from test_matrix import JSON, SMALL, Server, entered
from toolkit_lm import AsyncLLM, VllmConfig

NUM_TOKENS = 200_000
SENTENCES = "The quick brown fox jumps over it. " * (NUM_TOKENS // 13)
"""So many tokens of the small engine."""
MOST_LAG = 0.005
"""Seconds that the event loop may be held at a time, for which all other requests wait."""
LONG = {
    "max_model_len": 2**18,
    "max_num_batched_tokens": 8192,
    # A window makes the cost linear in the length.
    "hf_overrides": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 32,
        "max_position_embeddings": 2**18,
        "num_hidden_layers": 1,
    },
    "served_model_name": "tiny",
}


def save_first_layer(folder: Path) -> None:
    """The embedded model, cut after its first layer."""
    source = Path(toolkit_lm_tiny.__file__).parent / "checkpoint"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    kept = {
        name: tensor
        for name, tensor in load_file(source / "model.safetensors").items()
        if not re.match(r"model\.layers\.[1-9]", name)
    }
    save_file(kept, folder / "model.safetensors")


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("long") / "tiny"
    save_first_layer(folder)
    made = {"model": str(folder), **SMALL, **LONG}
    engines = {
        "generate": AsyncLLM(VllmConfig.make(**made)),
        "pooling": AsyncLLM(VllmConfig.make(**made, convert="embed")),
    }
    yield from entered(
        Server(engines, max_body_size="16MiB", max_request_cost="4GiB", strict_fields=False)
    )
    for engine in engines.values():
        engine.close()


def long_body(path: str, *, ids: bool) -> dict[str, Any]:
    """The route's good body with a long prompt."""
    field = first(path)
    value = enlarged(BODIES[path][field], ids=ids)
    # A vector for each token would be half a gigabyte of JSON.
    return {**BODIES[path], field: value[: len(value) // 10] if path == "/embed_all" else value}


def enlarged(value: Any, *, ids: bool) -> Any:
    """A field's good value with a prompt of NUM_TOKENS. `ids`: token ids in place of a text."""
    if isinstance(value, str):
        return [5] * NUM_TOKENS if ids else SENTENCES
    if isinstance(value, dict):
        # Other texts, such as a role, are words to choose from.
        texts = {"content"} & set(value) or set(value)
        return {
            key: enlarged(part, ids=False) if key in texts else part for key, part in value.items()
        }
    if isinstance(value[0], int):
        return [5] * NUM_TOKENS
    return [enlarged(value[0], ids=ids), *value[1:]]


class Lag:
    """The longest call of an event loop, in seconds that its thread computed: the machine may have
    other work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.longest = 0.0
        run = Handle._run

        def timed(handle: Handle) -> None:
            start = time.thread_time()
            run(handle)
            self.longest = max(self.longest, time.thread_time() - start)

        monkeypatch.setattr(Handle, "_run", timed)


def longest_call(server: Server, monkeypatch, path: str, body: dict[str, Any]) -> float:
    """The longest call for a request in seconds, of the least of three requests."""
    content = json.dumps(body).encode()
    lags = []
    # A collection of garbage, or another process in the caches, is not the request's.
    gc.disable()
    try:
        for _ in range(3):
            with monkeypatch.context() as patched:
                lag = Lag(patched)
                response, _ = server.send_once(path, content=content, headers=JSON)
                assert response.status_code < 500
            lags.append(lag.longest)
            if lag.longest < MOST_LAG:
                break
    finally:
        gc.enable()
    return min(lags)


def by_turns(paths: Iterable[str]) -> list[Any]:
    """Pairs of a route and whether its prompt is of ids. One of each route is left to the night,
    of routes by turns."""
    return [
        pytest.param(path, ids, marks=[pytest.mark.nightly] if ids == (number % 2 == 0) else [])
        for number, path in enumerate(paths)
        for ids in (False, True)
    ]


@pytest.mark.parametrize(("path", "ids"), by_turns(BODIES))
def test_a_long_prompt_holds_nobody_up(server, monkeypatch, path, ids):
    body = long_body(path, ids=ids)
    assert longest_call(server, monkeypatch, path, body) < MOST_LAG


@pytest.mark.parametrize(
    "more",
    [{}, {"return_token_ids": True}, {"return_progress": True}],
    ids=["plain", "token ids", "progress"],
)
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("path", [path for path in BODIES if path not in POOLED])
def test_the_stream_of_a_long_prompt_holds_nobody_up(server, monkeypatch, path, ids, more):
    """Its events may repeat the prompt."""
    body = {**long_body(path, ids=ids), "stream": True, **more}
    assert longest_call(server, monkeypatch, path, body) < MOST_LAG


def test_a_long_conversation_holds_nobody_up(server, monkeypatch):
    """Whether it is refused, or rendered: this engine takes 262,144 tokens."""
    # Seven tokens each.
    messages = [{"role": "user", "content": "a"}] * (NUM_TOKENS // 7)
    path = "/v1/chat/completions"
    assert path in BODIES
    for cut in ({}, {"truncate_prompt_tokens": 100}):
        body = {"messages": messages, "max_tokens": 1, **cut}
        assert longest_call(server, monkeypatch, path, body) < MOST_LAG


def test_a_long_prompt_is_admitted(server):
    """Else the limits above would say little."""
    for ids in (False, True):
        prompt = enlarged("a", ids=ids)
        for path, body in (
            ("/v1/completions", {"prompt": prompt, "max_tokens": 1}),
            ("/v1/embeddings", {"input": prompt}),
        ):
            response, _ = server.send_once(path, json=body)
            assert response.status_code == 200
            assert response.json()["usage"]["prompt_tokens"] > NUM_TOKENS * 0.98
