"""Routes of vLLM: tokens in and out, the engine's options, and the whole vocabulary's log
probabilities."""

from __future__ import annotations

import math

import httpx
import pytest
from toolkit_lm import AsyncLLM
from toolkit_lm.config import VllmConfig
from toolkit_lm_server.app import create_app
from toolkit_lm_server.options import ServerOptions

pytestmark = pytest.mark.anyio
IDS = [5, 6, 7, 8]
GREEDY = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module")
async def engine():
    config = VllmConfig.make(model="tiny", max_logprobs=2**20, max_model_len=64)
    async with AsyncLLM(config) as made:
        yield made


@pytest.fixture
async def client(engine):
    app = create_app(engine, ServerOptions(routes=("vllm_names",), admin_routes=True))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as made:
        yield made


async def generate(client, **fields):
    return await client.post("/inference/v1/generate", json={"token_ids": IDS, **fields})


async def test_tokens_in_tokens_out(client):
    body = {"prompt": IDS, "return_token_ids": True, **GREEDY}
    [expected] = (await client.post("/v1/completions", json=body)).json()["choices"]
    params = {**GREEDY, "detokenize": False, "n": 2, "logprobs": 1, "prompt_logprobs": 0}
    reply = await generate(client, sampling_params=params, request_id="mine", cache_salt="s")
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    assert answer["request_id"] == "mine" and len(answer["choices"]) == 2
    for choice in answer["choices"]:
        assert choice["token_ids"] == expected["token_ids"] and choice["finish_reason"] == "length"
        assert len(choice["logprobs"]["content"]) == 6 and "text" not in choice
    assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"]) == len(IDS)
    assert (await generate(client)).json()["request_id"].startswith("generate-")


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": []},
        {"token_ids": [2**30]},
        {"token_ids": "hi"},
        {"sampling_params": {"temperature": -1}},
        {"sampling_params": {"prompt": "hi"}},
        {"sampling_params": {"stream": True}},
        {"sampling_params": {"extra_args": [1]}},
        {"stream": True},
        {"features": {"image": []}},
        {"kv_transfer_params": {"do_remote_decode": True}},
        {"request_id": "x" * 200},
    ],
)
async def test_wrong_requests(client, fields):
    reply = await generate(client, **fields)
    assert reply.status_code == 400 and reply.json()["error"]["message"], reply.text


async def test_options_of_the_engine(client, engine):
    text = (await client.get("/server_info")).json()["vllm_config"]
    assert "max_model_len=64" in text and 'model="tiny"' in text
    made = (await client.get("/server_info", params={"config_format": "json"})).json()
    # TRL reads these.
    assert made["vllm_config"]["model_config"]["max_model_len"] == 64
    assert made["vllm_config"]["model_config"]["logprobs_mode"] == "raw_logprobs"
    assert made["vllm_config"]["weight_transfer_config"] is None
    assert (await client.get("/server_info", params={"config_format": "xml"})).status_code == 400


async def test_they_are_off_until_they_are_named(engine):
    for options, path in (
        (ServerOptions(), "/inference/v1/generate"),
        (ServerOptions(routes=("vllm_names",)), "/server_info"),
    ):
        transport = httpx.ASGITransport(create_app(engine, options))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await client.get(path)).status_code in (404, 405)
            assert (await client.post(path, json={"token_ids": IDS})).status_code in (404, 405)


async def test_log_probabilities_of_all_tokens(client, engine):
    size = engine.config.vocab_size
    body = {"prompt": IDS, **GREEDY, "logprobs": -1, "prompt_logprobs": -1}
    [choice] = (await client.post("/v1/completions", json=body)).json()["choices"]
    for table in choice["prompt_logprobs"][1:]:
        assert len(table) == size
        total = math.fsum(math.exp(entry["logprob"]) for entry in table.values())
        assert total == pytest.approx(1, abs=1e-4)
    assert len(choice["logprobs"]["tokens"]) == 6
    echo = {**body, "echo": True, "prompt_logprobs": None}
    reply = await client.post("/v1/completions", json=echo)
    assert reply.status_code == 200, reply.text


async def test_they_are_bounded_by_max_logprobs():
    async with AsyncLLM(VllmConfig.make(model="tiny", max_model_len=64)) as engine:
        transport = httpx.ASGITransport(create_app(engine, ServerOptions()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for name in ("logprobs", "prompt_logprobs"):
                body = {"prompt": IDS, name: -1}
                reply = await client.post("/v1/completions", json=body)
                assert reply.status_code == 400 and "max_logprobs" in reply.text
