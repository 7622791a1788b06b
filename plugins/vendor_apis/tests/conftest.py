"""The routes over tiny, in this process."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from documented_requests import classifier
from fastapi import FastAPI
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm_server.app import create_app
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions

# Drawn tokens are the same in every run: drawn white space alone can fill an answer in JSON.
SMALL = {
    "seed": 0,
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_model_len": 256,
    "engine_process": False,
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Engines(dict[str, AsyncLLM]):
    """Small engines by name. Each is made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        """`folder`: where checkpoints are written."""
        self._folder = folder

    def __missing__(self, name: str) -> AsyncLLM:
        self[name] = AsyncLLM(VllmConfig.make(**self._options(name), **SMALL))
        return self[name]

    def _options(self, name: str) -> dict[str, Any]:
        if name == "generate":
            return {"model": "tiny", "served_model_name": ["tiny", "small"]}
        if name == "embed":
            return {"model": "tiny", "convert": "embed"}
        folder = self._folder / name
        folder.mkdir()
        return {
            "model": classifier(folder, {"rank": 1, "classify": 3}[name]),
            "load_format": "dummy",
        }


@pytest.fixture(scope="session")
def engines(tmp_path_factory) -> Iterator[Engines]:
    """Engines: "generate", "embed", "classify" and "rank"."""
    made = Engines(tmp_path_factory.mktemp("checkpoints"))
    yield made
    for engine in made.values():
        engine.close()


@pytest.fixture(scope="session")
def apps(engines) -> Callable[..., FastAPI]:
    """apps(name, **options): the app over that engine, made once: it takes longer than most
    tests."""

    @functools.cache
    def app(name: str, **options: Any) -> FastAPI:
        return create_app(engines[name], ServerOptions(**options), metrics=Metrics())

    return app


@pytest.fixture
def serve(apps):
    """serve(name, **options): a client of an app over that engine."""

    @asynccontextmanager
    async def served(name: str = "generate", **options) -> AsyncIterator[httpx.AsyncClient]:
        app = apps(name, **options)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://test"
        ) as client:
            yield client

    return served


class Said:
    """An answer with reasoning, a text and two calls, as chunks or whole."""

    def __init__(self, finish_reason: str = "tool_calls") -> None:
        self._calls = (("call_a", "f", '{"x": 1}'), ("call_b", "g", "{}"))
        self._finish_reason = finish_reason

    def usage(self):
        return {
            "prompt_tokens": 3,
            "completion_tokens": 9,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 1},
        }

    def whole(self, choices):
        calls = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": text}}
            for id, name, text in self._calls
        ]
        message = {
            "role": "assistant",
            "reasoning_content": "hm so",
            "content": "I call",
            "tool_calls": calls,
        }
        return {"choices": [{"index": 0, "message": message, "finish_reason": self._finish_reason}]}

    async def chunks(self):
        def chunk(finish=None, **delta):
            return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

        yield [chunk(role="assistant", content="")]
        yield [chunk(reasoning_content="hm"), chunk(reasoning_content=" so")]
        yield [chunk(content="I"), chunk(content=" call")]
        for index, (id, name, text) in enumerate(self._calls):
            yield [
                chunk(
                    tool_calls=[
                        {
                            "index": index,
                            "id": id,
                            "type": "function",
                            "function": {"name": name, "arguments": ""},
                        }
                    ]
                )
            ]
            for part in text:
                yield [chunk(tool_calls=[{"index": index, "function": {"arguments": part}}])]
        yield [chunk(self._finish_reason)]
        yield [{"choices": [], "usage": self.usage()}]


@pytest.fixture
def said() -> type[Said]:
    return Said
