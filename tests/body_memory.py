"""Sends the largest bodies of each route to an app over `tiny`, and prints what the process took
for each as JSON.

usage: python tests/body_memory.py generate|embed [all]

Without `all`, routes that take what another one takes get every second of their bodies.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from toolkit_lm import AsyncLLM
from toolkit_lm.config import VllmConfig
from toolkit_lm_server.app import create_app
from toolkit_lm_server.garbage import _trim
from toolkit_lm_server.json_body import Bodies
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_serving.budget import CostBudget

SLACK = 16 * 2**20
"""Bytes that every estimate has beside: the interpreter's, and what is imported late."""
NO_BODIES = re.compile(r"/ping|/reset_prefix_cache|.*/cancel")
# A token for each byte, four bytes a character: as much as one request may cost, and more than
# that.
LARGE = "\U0001f600" * 560_000
TOO_LARGE = "\U0001f600" * 3_900_000
SPACED = "a b " * 260_000
# Nearly a token for each byte, tokenized in pieces: of as many characters as one text may have.
PIECES = "\u0436\u0449 \u0439\u044a " * 170_000
MANY = 43_000


def talk(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def bodies() -> dict[str, list[dict[str, Any]]]:
    """Bodies by route: a long text, many texts or messages, and bodies that are refused for their
    size."""
    texts = [LARGE, SPACED, PIECES, TOO_LARGE]
    many = talk("a") * MANY
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}] * MANY}]
    chats = [{"messages": one, "max_tokens": 1} for one in (*map(talk, texts), many, parts)]
    named = [{**one, "model": "tiny"} for one in (chats[0], chats[4])]
    inputs = [
        {"input": one, "truncate_prompt_tokens": 10}
        for one in (*texts, ["a b"] * 2000, [LARGE[i:] for i in range(3)])
    ]
    documents = [
        {"query": "a", "documents": one} for one in ([LARGE], [PIECES], [TOO_LARGE], ["a b"] * 2000)
    ]
    prompts = [{"prompt": one, "max_tokens": 1} for one in (*texts, ["a b"] * 256, [5] * 200_000)]
    scores = [
        {"text_1": "a", "text_2": one} for one in (LARGE, [PIECES], TOO_LARGE, ["a b"] * 2000)
    ]
    cohere = [
        {"model": "tiny", "texts": one, "input_type": "search_document"}
        for one in ([LARGE], ["a b"] * 90)
    ]
    ollama = [{"model": "tiny", "prompt": LARGE, "stream": False}]
    return {
        "/v1/chat/completions": chats,
        "/v1/chat/completions/batch": [{**one, "messages": [one["messages"]]} for one in chats[:1]],
        "/v1/completions": [
            *prompts,
            {"prompt": LARGE, "suffix": "a", "max_tokens": 1},
            {"prompt": SPACED, "add_special_tokens": False},
        ],
        "/infill": [{"input_prefix": one, "input_suffix": "a"} for one in texts],
        "/v1/responses": [{"input": one} for one in (*texts, many)],
        "/invocations": [prompts[0], chats[0]],
        "/tokenize": [{"prompt": one} for one in texts]
        + [{"prompt": LARGE, "return_token_strs": True}, {"messages": talk(SPACED)}],
        "/detokenize": [{"tokens": [5] * 260_000}],
        "/v1/embeddings": inputs,
        "/classify": inputs,
        "/pooling": [{**one, "task": "embed"} for one in inputs],
        "/v1/embed": cohere[:1],
        "/v2/embed": cohere,
        # Routes of two names have one handler.
        "/score": scores,
        "/v1/score": scores[:1],
        "/rerank": [*documents, {**documents[0], "max_tokens_per_doc": 10}],
        "/v1/rerank": documents[:1],
        "/v2/rerank": [{**one, "model": "tiny"} for one in documents],
        "/v1/messages": named,
        "/v1/messages/count_tokens": named,
        "/v2/chat": named,
        "/api/chat": [
            {"model": "tiny", "messages": one["messages"], "stream": False} for one in chats[:1]
        ],
        "/api/generate": ollama,
        "/api/embed": [{"model": "tiny", "input": one} for one in (LARGE, ["a b"] * 2000)],
        "/api/embeddings": ollama,
        "/api/show": [{"model": "a" * 15_000_000}],
    }


WHOLE = ("/v1/chat/completions", "/v1/embeddings", "/v1/messages/count_tokens")
"""Routes that get all of their bodies in any case."""


def sampled(given: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Every second body of each route, from the first or from the second on in turns."""
    return {
        path: of_path if path in WHOLE or len(of_path) == 1 else of_path[number % 2 :: 2]
        for number, (path, of_path) in enumerate(given.items())
    }


class Estimate:
    """The bytes that the server expects to hold, at most at a time."""

    def __init__(self) -> None:
        self.most = self._held = 0
        spend = CostBudget.spend
        cost = Bodies.cost

        @contextmanager
        def spent(budget: CostBudget, asked: Any, *arguments: Any) -> Iterator[None]:
            with spend(budget, asked, *arguments):
                self._add(total := sum(asked.values()))
                try:
                    yield
                finally:
                    self._held -= total

        def cost_of(bodies: Bodies, body: bytes) -> int:
            self._body = cost(bodies, body)
            self._add(0)
            return self._body

        CostBudget.spend = spent  # type: ignore[assignment, method-assign]
        Bodies.cost = cost_of  # type: ignore[assignment, method-assign]
        self._body = 0

    def begin(self) -> None:
        self.most = self._body = 0

    def _add(self, size: int) -> None:
        self._held += size
        self.most = max(self.most, self._held + self._body)


def shortened(value: Any) -> Any:
    """For a request before the one that is measured: what is made once is there then."""
    if isinstance(value, dict):
        return {name: shortened(part) for name, part in value.items()}
    if isinstance(value, str | list) and len(value) > 16:
        value = value[:1]
    return [shortened(part) for part in value] if isinstance(value, list) else value


def memory(name: str) -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )
    return int(line.split()[1]) * 1024


async def measure(convert: str, *, is_whole: bool) -> dict[str, Any]:
    estimate = Estimate()
    trim = _trim()
    given = bodies() if is_whole else sampled(bodies())
    options = {} if convert == "generate" else {"convert": convert}
    engine = AsyncLLM(VllmConfig.make(model="tiny", **options))
    try:
        await engine.wait_ready()
        app = create_app(engine, ServerOptions())
        routes = sorted(
            {route.path for route in app.state.api if "POST" in getattr(route, "methods", ())}
        )
        unknown = [path for path in routes if path not in given and not NO_BODIES.fullmatch(path)]
        found = []
        statuses = {}
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://x", timeout=300
        ) as client:
            for path in routes:
                for number, body in enumerate(given.get(path, ())):
                    content = json.dumps(body, ensure_ascii=False).encode()
                    await client.post(path, json=shortened(body))
                    gc.collect()
                    trim(0)
                    Path("/proc/self/clear_refs").write_text("5")
                    estimate.begin()
                    before = memory("VmRSS")
                    reply = await client.post(
                        path, content=content, headers={"content-type": "application/json"}
                    )
                    peak = memory("VmHWM") - before
                    statuses.setdefault(path, []).append(reply.status_code)
                    told = reply.text[:200] if reply.status_code != 200 else ""
                    name = f"{path} {number} ({len(content):,} bytes)"
                    one = {
                        "name": name,
                        "peak": peak,
                        "estimate": estimate.most + SLACK,
                        "status": reply.status_code,
                        "told": told,
                    }
                    print(one, file=sys.stderr, flush=True)
                    found.append(one)
        return {"routes": routes, "unknown": unknown, "statuses": statuses, "bodies": found}
    finally:
        engine.close()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(sys.argv[1], is_whole="all" in sys.argv[2:]))))
