"""Routes of operators, and the figure of sleep."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import httpx
import pytest
from toolkit_lm import AsyncLLM
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.plugin import Plugins
from toolkit_lm_server.app import create_app
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions

BODY = {"prompt": [5, 6, 7, 8], "max_tokens": 4, "temperature": 0, "return_token_ids": True}


@asynccontextmanager
async def served(policies, folder=None, own=None, **server):
    metrics = Metrics(model_name="policy")
    own = {"rl": own or ({} if folder is None else {"folder": str(folder)})}
    plugins = Plugins.load(PluginsConfig(plugin_option=own), extra=[metrics])
    config = VllmConfig.make(
        model=str(policies / "old"),
        engine_process=False,
        renderer="tokens",
        dtype="float32",
        max_model_len=64,
        num_kv_blocks=32,
        block_size=16,
        plugin_option=own,
    )
    async with AsyncLLM(config, plugins=plugins) as llm:
        await llm.wait_ready()
        app = create_app(llm, ServerOptions(**server), metrics=metrics)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            yield client


async def tokens(client):
    answer = await client.post("/v1/completions", json=BODY)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


async def asked(client, method, path, status=200, **options):
    answer = await client.request(method, path, **options)
    assert answer.status_code == status, answer.text
    return answer.json()


async def sleep_states(client):
    text = (await client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("toolkit_lm_engine_sleep_sta")]
    return {line.split('sleep_state="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


@pytest.mark.anyio
async def test_operators_pause_and_sleep(policies):
    async with served(policies, admin_routes=True) as client:
        expected = await tokens(client)
        assert await asked(client, "POST", "/pause?mode=keep") == {"status": "paused"}
        assert await asked(client, "GET", "/is_paused") == {"is_paused": True}
        assert await asked(client, "GET", "/is_sleeping") == {"is_sleeping": False}
        assert await asked(client, "POST", "/resume") == {"status": "resumed"}
        assert await asked(client, "GET", "/is_paused") == {"is_paused": False}
        assert await sleep_states(client) == {
            "awake": 1.0,
            "weights_offloaded": 0.0,
            "discard_all": 0.0,
        }
        for level, name in ((1, "weights_offloaded"), (2, "discard_all")):
            found = await asked(client, "POST", f"/sleep?level={level}")
            assert found == {"status": "sleeping", "level": level}
            assert await asked(client, "GET", "/is_sleeping") == {"is_sleeping": True}
            assert (await sleep_states(client))[name] == 1.0
            found = await asked(client, "POST", "/wake_up?tags=weights&tags=kv_cache")
            assert found == {"status": "awake", "tags": ["weights", "kv_cache"]}
            assert await tokens(client) == expected
        await asked(client, "POST", "/sleep?level=3", 400)
        await asked(client, "POST", "/wake_up?tags=all", 400)
        assert await asked(client, "GET", "/get_world_size") == {"world_size": 1}


@pytest.mark.anyio
async def test_operators_change_weights(policies):
    async with served(policies, policies, admin_routes=True) as client:
        before = await tokens(client)
        assert await asked(client, "GET", "/weight_info") == {"weight_version": ""}

        async def update(path, status=200):
            body = {"update_info": {"path": path}}
            return await asked(client, "POST", "/update_weights", status, json=body)

        await asked(client, "POST", "/start_weight_update")
        for path, text in (
            ("../x", "is not in the folder of weights"),
            ("/etc", "is not in the folder of weights"),
            ("nowhere", "cannot be read"),
        ):
            assert text in str(await update(path, 400))
        await update("new")
        found = await asked(client, "POST", "/finish_weight_update", json={"weight_version": "7"})
        assert found["weight_version"] == "7"
        assert await asked(client, "GET", "/weight_info") == {"weight_version": "7"}
        assert await tokens(client) != before
        await update("old")
        await asked(client, "POST", "/start_weight_update")
        found = await asked(client, "POST", "/finish_weight_update", 400, json={})
        assert "no weights were given" in str(found)
        await update("old")
        found = await asked(client, "POST", "/finish_weight_update", json={})
        assert found["weight_version"] == "8"
        assert await tokens(client) == before
        body = {"new_version": "again"}
        assert (await asked(client, "POST", "/update_weight_version", json=body))["success"]
        assert await asked(client, "GET", "/weight_info") == {"weight_version": "again"}


@pytest.mark.anyio
async def test_operators_call_workers(policies):
    path = str(policies / "new" / "model.safetensors")
    own = {"worker_extension_cls": "rl_extension.PolicyWorker"}
    async with served(policies, own=own, admin_routes=True) as client:

        async def called(status=200, **body):
            return await asked(client, "POST", "/collective_rpc", status, json=body)

        assert await called(method="layers") == {"results": [2]}
        before = await tokens(client)
        found = await called(method="load", kwargs={"path": path}, timeout=60)
        assert found["results"][0] > 10
        assert await tokens(client) != before
        assert await asked(client, "GET", "/weight_info") == {"weight_version": "1"}
        for body, text in (
            ({"method": "lode"}, "Did you mean 'load'"),
            ({"method": "picture"}, "is no JSON"),
            ({"method": "__init__"}, "has no method"),
            ({"args": []}, "method"),
        ):
            assert text in str(await called(400, **body))
    async with served(policies, own=own) as client:
        await asked(client, "POST", "/collective_rpc", 404, json={"method": "layers"})


def events(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.anyio
async def test_answers_tell_the_weights_version(policies):
    async with served(policies, policies, admin_routes=True) as client:
        answer = await asked(client, "POST", "/v1/completions", json=BODY)
        assert "weight_versions" not in answer["choices"][0]
        body = {"update_info": {"path": "new"}}
        await asked(client, "POST", "/update_weights", json=body)
        await asked(client, "POST", "/finish_weight_update", json={"weight_version": "7"})
        spans = [{"version": "7", "start": 0, "end": 4}]
        answer = await asked(client, "POST", "/v1/completions", json={**BODY, "n": 2})
        assert [choice["weight_versions"] for choice in answer["choices"]] == [spans, spans]
        stream = await client.post("/v1/completions", json={**BODY, "stream": True})
        told = [event["choices"][0].get("weight_versions") for event in events(stream.text)]
        assert told[-1] == spans
        assert not any(told[:-1])
        schema = (await asked(client, "GET", "/openapi.json"))["components"]["schemas"]
        assert schema["CompletionChoice"]["properties"]["weight_versions"]["description"]


@pytest.mark.anyio
async def test_only_operators_have_them(policies):
    async with served(policies) as client:
        for path in ("/pause", "/sleep", "/update_weights"):
            await asked(client, "POST", path, 404)
    async with served(policies, admin_routes=True) as client:
        body = {"update_info": {"path": "new"}}
        found = await asked(client, "POST", "/update_weights", 400, json=body)
        assert "rl.folder names, and it names none" in str(found)
