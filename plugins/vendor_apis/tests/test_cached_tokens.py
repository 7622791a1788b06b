"""Each usage that an API describes tells how much of the prompt was cached; and it is true."""

from __future__ import annotations

import pytest
from toolkit_lm.plugin import Plugins
from toolkit_lm_server.plugin_routes import HOOK

pytestmark = pytest.mark.anyio
PROMPT = {
    "prompt_tokens",
    "input_tokens",
    "prompt_eval_count",
    "tokens_evaluated",
    "num_prompt_tokens",
}
"""Names of the number of a prompt's tokens."""
CACHED = {
    "prompt_tokens_details",
    "input_tokens_details",
    "cache_read_input_tokens",
    "cached_tokens",
    "tokens_cached",
    "num_cached_tokens",
}
"""Names beside them of the number of cached ones."""
WITHOUT = {
    "OllamaChat": "Ollama's API has no place for it",
    "OllamaText": "Ollama's API has no place for it",
    "OllamaVectors": "Ollama's API has no place for it",
    "BilledUnits": "what is billed, in Cohere's words; the tokens stand beside it",
    "TokenCount": "the prompt is counted, and not computed",
}


def described(schema, schemas, name, found, seen):
    """Adds each object with a prompt's tokens that a schema reaches, by the name of its class."""
    if isinstance(schema, list):
        for part in schema:
            described(part, schemas, name, found, seen)
    if not isinstance(schema, dict):
        return
    if (reference := schema.get("$ref")) is not None:
        name = reference.rpartition("/")[2]
        if name not in seen:
            seen.add(name)
            described(schemas[name], schemas, name, found, seen)
        return
    fields = schema.get("properties")
    if isinstance(fields, dict) and fields.keys() & PROMPT:
        found[name] = fields
    for part in schema.values():
        described(part, schemas, name, found, seen)


async def test_each_usage_has_a_place_for_cached_tokens(serve):
    names = tuple(info.name for info, _ in Plugins.load().implementations(HOOK))
    async with serve(routes=names, admin_routes=True) as client:
        document = (await client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    found = {}
    routes = set()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            reached = {}
            answers = [a for s, a in operation["responses"].items() if s.startswith("2")]
            described(answers, schemas, f"{method} {path}", reached, set())
            if reached:
                routes.add(path)
                found |= reached
    assert {"/v1/chat/completions", "/v1/embeddings", "/v1/messages", "/generate"} <= routes
    missing = {name for name, fields in found.items() if not fields.keys() & CACHED}
    assert missing == WITHOUT.keys(), {name: sorted(found[name]) for name in missing}


TALK = {"max_tokens": 2, "messages": [{"role": "user", "content": "tell me of the sea " * 8}]}
LONG = {**TALK, "messages": [{"role": "user", "content": "tell me of the sea " * 16}]}
MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


async def test_what_cache_control_has_put_into_the_cache(serve):
    async with serve() as client:

        async def used(body):
            answer = await client.post("/v1/messages", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()["usage"]

        first, second, longer, plain = [
            await used(body) for body in (TALK | MARK, TALK | MARK, LONG | MARK, LONG)
        ]
        async with client.stream("POST", "/v1/messages", json=LONG | MARK | {"stream": True}) as s:
            text = (await s.aread()).decode()
    created = first["cache_creation_input_tokens"]
    assert created > 0 and created % 16 == 0 and 0 < first["input_tokens"] <= 16
    assert first["cache_creation"] == {
        "ephemeral_5m_input_tokens": 0,
        "ephemeral_1h_input_tokens": created,
    }
    assert first["cache_read_input_tokens"] == 0
    assert second["cache_read_input_tokens"] == created
    assert second["cache_creation_input_tokens"] == 0
    sums = [
        usage["cache_read_input_tokens"]
        + usage["cache_creation_input_tokens"]
        + usage["input_tokens"]
        for usage in (first, second, longer, plain)
    ]
    assert sums[0] == sums[1] < sums[2] == sums[3]
    assert longer["cache_creation_input_tokens"] > 0 < longer["cache_read_input_tokens"]
    assert plain["cache_creation_input_tokens"] == 0 < plain["cache_read_input_tokens"]
    assert '"cache_creation_input_tokens"' in text
