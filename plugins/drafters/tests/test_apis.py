"""A request's fields, and what usage tells, in OpenAI's APIs; the limits of other APIs."""

from __future__ import annotations

import httpx
import pytest
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm_server.app import create_app
from toolkit_lm_server.options import ServerOptions

TEXT = (
    "Once upon a time there was a cat. The cat said: I am a cat. The cat said: I am a cat. The cat"
)
TALK = [{"role": "user", "content": TEXT}]
BODIES = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 40, "ignore_eos": True},
    "/v1/chat/completions": {"messages": TALK, "max_tokens": 40, "ignore_eos": True},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 40},
}
FIELDS = {"model": "tiny", "temperature": 0}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def app():
    config = VllmConfig.make(
        model="tiny",
        dtype="float32",
        device="cpu",
        max_model_len=256,
        max_num_seqs=4,
        engine_process=False,
        drafter="ngram",
        draft_budget="all",
    )
    engine = AsyncLLM(config)
    yield create_app(engine, ServerOptions())
    engine.close()


async def post(app, path, **fields) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(path, json=fields)


@pytest.mark.anyio
@pytest.mark.parametrize("path", BODIES)
async def test_each_api_takes_the_fields(app, path):
    for extra in ({"speculative": False}, {"max_draft_tokens": 2}):
        answer = await post(app, path, **FIELDS, **BODIES[path], **extra)
        assert answer.status_code == 200, answer.text
    answer = await post(app, path, **FIELDS, **BODIES[path], max_draft_tokens=-1)
    assert answer.status_code == 400 and "max_draft_tokens" in answer.text


@pytest.mark.anyio
async def test_ollamas_limit(app):
    """The answer is the same with any limit. -1 is refused."""
    body = {"model": "tiny", "prompt": TEXT, "raw": True, "stream": False}
    answers = []
    for extra in ({}, {"draft_num_predict": 0}, {"draft_num_predict": 2}):
        options = {"temperature": 0, "num_predict": 40, **extra}
        answer = await post(app, "/api/generate", **body, options=options)
        assert answer.status_code == 200, answer.text
        answers.append(answer.json()["response"])
    assert answers[0] == answers[1] == answers[2]
    answer = await post(app, "/api/generate", **body, options={"draft_num_predict": -1})
    assert answer.status_code == 400 and "draft_num_predict" in answer.text


@pytest.mark.anyio
@pytest.mark.parametrize("field", ["speculative.n_max", "speculative.n_min", "speculative.p_min"])
async def test_llama_cpps_limits_are_refused_by_name(app, field):
    answer = await post(app, "/v1/completions", **FIELDS, prompt=TEXT, **{field: 3})
    assert answer.status_code == 400, answer.text
    assert field in answer.text and "max_draft_tokens" in answer.text


WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


@pytest.mark.anyio
@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_tool_calls_are_those_without_drafts(choice):
    """Called freely, and by a grammar that forces a part of the call."""
    config = VllmConfig.make(
        model="tiny-tools",
        dtype="float32",
        device="cpu",
        engine_process=False,
        drafter="ngram,suffix",
        draft_budget="all",
    )
    body = {
        "model": "tiny-tools",
        "temperature": 0,
        "max_tokens": 64,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [{"type": "function", "function": WEATHER}],
        "tool_choice": choice,
    }
    engine = AsyncLLM(config)
    try:
        app = create_app(engine, ServerOptions())
        found = []
        for speculative in (True, True, False):
            answer = await post(app, "/v1/chat/completions", **body, speculative=speculative)
            assert answer.status_code == 200, answer.text
            [one] = answer.json()["choices"]
            for call in one["message"]["tool_calls"]:
                assert call.pop("id")
            found.append((one, answer.json()["usage"].get("accepted_draft_tokens")))
    finally:
        engine.close()
    assert found[0][0] == found[1][0] == found[2][0]
    assert found[1][1], "the second time, drafts are the first answer"


@pytest.mark.anyio
@pytest.mark.parametrize("path", list(BODIES)[:2])
async def test_usage_tells_of_drafts(app, path):
    usual = await post(app, path, **FIELDS, **BODIES[path])
    without = await post(app, path, **FIELDS, **BODIES[path], speculative=False)
    usage = usual.json()["usage"]
    assert 0 < usage["accepted_draft_tokens"] <= usage["draft_tokens"]
    assert "draft_tokens" not in without.json()["usage"]
    assert usage["drafters"] == {
        "ngram": {key: usage[key] for key in ("draft_tokens", "accepted_draft_tokens")}
    }
    assert usual.json()["choices"] == without.json()["choices"]
