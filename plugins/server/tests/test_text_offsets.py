"""Places of tokens in a text, of streams and whole answers."""

from __future__ import annotations

import json

import httpx
import pytest
from toolkit_lm import AsyncLLM
from toolkit_lm.config import VllmConfig
from toolkit_lm_server.app import create_app
from toolkit_lm_server.options import ServerOptions

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module")
async def client():
    async with AsyncLLM(VllmConfig.make(model="tiny", max_model_len=128)) as engine:
        transport = httpx.ASGITransport(create_app(engine, ServerOptions()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as made:
            yield made


def joined(text: str) -> dict[int, dict[str, list]]:
    """Log probabilities of a stream's choices, by their index."""
    found: dict[int, dict[str, list]] = {}
    for line in text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                mine = found.setdefault(choice["index"], {"text": [], "text_offset": []})
                mine["text"].append(choice["text"])
                mine["text_offset"] += (choice["logprobs"] or {"text_offset": []})["text_offset"]
    return found


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize(
    "stop",
    [
        None,
        # Nearly all that comes is held back, for it may be the beginning of one.
        ["e" * 40, " " * 40, "a story that nobody tells"],
        ["a"],
    ],
)
async def test_a_stream_has_the_offsets_of_the_whole(client, stop, echo):
    """A text that is held back comes with a later event than its tokens, and a character with its
    last byte's."""
    body = {
        "prompt": "A \N{GRINNING FACE}, once",
        "logprobs": 1,
        "max_tokens": 24,
        "n": 3,
        "echo": echo,
        "temperature": 3.0,
        "stop": stop,
    }
    for seed in range(4):
        asked = {**body, "seed": seed}
        whole = (await client.post("/v1/completions", json=asked)).json()["choices"]
        reply = await client.post("/v1/completions", json={**asked, "stream": True})
        streamed = joined(reply.text)
        for choice in whole:
            mine = streamed[choice["index"]]
            assert "".join(mine["text"]) == choice["text"]
            assert mine["text_offset"] == choice["logprobs"]["text_offset"]
            assert sorted(mine["text_offset"]) == mine["text_offset"]
