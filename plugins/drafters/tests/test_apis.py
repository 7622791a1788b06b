"""A request's fields, and what usage tells, in OpenAI's APIs. Other vendors' APIs have no fields
for them, as for other parameters of plugins."""

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
@pytest.mark.parametrize("path", list(BODIES)[:2])
async def test_usage_tells_of_drafts(app, path):
    usual = await post(app, path, **FIELDS, **BODIES[path])
    without = await post(app, path, **FIELDS, **BODIES[path], speculative=False)
    usage = usual.json()["usage"]
    assert 0 < usage["accepted_draft_tokens"] <= usage["draft_tokens"]
    assert "draft_tokens" not in without.json()["usage"]
    assert usual.json()["choices"] == without.json()["choices"]
