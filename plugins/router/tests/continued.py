"""Servers of ours as commands, and streams that are to be the same wherever they went on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

SERVE = ("serve", "tiny", "--port", "0", "--kernels", "cpu", "--no-ui", "--no-access-log")


class Command:
    """A command of `toolkit` that listens."""

    def __init__(self, *words: str, under: Sequence[str] = ()) -> None:
        """`under`: a command that runs it."""
        self.process = subprocess.Popen(
            [*under, str(Path(sys.executable).with_name("toolkit")), *words],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def url(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r" at (http://\S+)", line):
                return found[1]
        raise AssertionError("it ended early")

    def send(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 60}}}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": "Once upon a time", "temperature": 0}),
    ("completions", {"prompt": "The sea", "seed": 5, "temperature": 0.9, "n": 3}),
    (
        "completions",
        {
            "prompt": [5, 6, 7],
            "seed": 6,
            "logprobs": 2,
            "return_token_ids": True,
            "presence_penalty": 1.0,
            "frequency_penalty": 0.5,
        },
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "seed": 3, "logprobs": True},
    ),
    (
        "chat/completions",
        {
            "messages": [{"role": "user", "content": "json"}],
            "seed": 4,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            },
            "return_token_ids": True,
        },
    ),
]


def joined(stream: bytes) -> dict[Any, Any]:
    """What a stream says, by choice and field. Raises AssertionError for an error in it."""
    assert stream.endswith(b"data: [DONE]\n\n"), stream[-300:]
    found: dict[Any, Any] = {}
    ids = set()
    for line in stream.split(b"\n\n"):
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        assert "error" not in event, event
        ids.add(event["id"])
        if event.get("usage"):
            found["usage"] = {k: event["usage"][k] for k in ("prompt_tokens", "completion_tokens")}
        for choice in event["choices"]:
            parts = {**choice, **choice.get("delta", {})}
            for name in ("text", "content", "role", "finish_reason"):
                if parts.get(name):
                    key = choice["index"], name
                    found[key] = found.get(key, "") + parts[name]
            for name, values in (
                ("token_ids", parts.get("token_ids") or []),
                *(
                    (f"logprobs.{name}", values)
                    for name, values in (parts.get("logprobs") or {}).items()
                    # Offsets depend on where a character of several tokens is cut.
                    if name != "text_offset"
                ),
            ):
                key = choice["index"], name
                found[key] = found.get(key, []) + (values or [])
    assert len(ids) == 1
    return found


async def ask(
    client: aiohttp.ClientSession,
    url: str,
    path: str,
    fields: dict[str, Any],
    begun: set[int] | None = None,
    number: int = 0,
    max_tokens: int = 300,
) -> dict[Any, Any]:
    """What a stream says. `begun` has its number from its first byte to its last."""
    body = {
        **fields,
        "max_tokens": max_tokens,
        "stream": True,
        "ignore_eos": "response_format" not in fields,
        "stream_options": {"include_usage": True},
    }
    async with client.post(f"{url}/v1/{path}", json=body) as answer:
        assert answer.status == 200, await answer.text()
        first = await answer.content.read(1)
        begun = set() if begun is None else begun
        begun.add(number)
        stream = first + await answer.read()
        begun.remove(number)
    assert (b"token_ids" in stream) == ("return_token_ids" in fields)
    return joined(stream)
