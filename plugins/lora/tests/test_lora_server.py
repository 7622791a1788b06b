"""Adapters over HTTP: as models, loaded and unloaded by operators."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager

import httpx
import pytest
from lora_adapters import FORMS, PROMPT, Adapters
from toolkit_lm import AsyncLLM
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.plugin import Plugins
from toolkit_lm_server.app import create_app
from toolkit_lm_server.options import ServerOptions

BODY = {
    "prompt": PROMPT,
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    forms = {name: FORMS["llama"][name] for name in ("all", "rslora")}
    return Adapters(tmp_path_factory.mktemp("server"), "llama", forms)


@asynccontextmanager
async def served(adapters, folder, **own):
    """(client, engine). Adapters of `folder` are registered."""
    options = {"folder": str(folder), **own}
    plugins = Plugins.load(PluginsConfig(plugin_option={"lora": options}))
    config = VllmConfig.make(
        model=str(adapters.checkpoint),
        engine_process=False,
        num_kv_blocks=256,
        block_size=16,
        max_model_len=128,
        dtype="float32",
        served_model_name=["base"],
        plugin_option={"lora": options},
    )
    async with AsyncLLM(config=config, plugins=plugins) as engine:
        app = create_app(engine, ServerOptions(admin_routes=True))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            yield client, engine


async def tokens(client, model, **fields):
    answer = await client.post("/v1/completions", json={**BODY, "model": model, **fields})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["model"] == model
    return body["choices"][0]["token_ids"]


@pytest.fixture
def folder(adapters, tmp_path):
    made = tmp_path / "adapters"
    for name in ("all", "rslora"):
        shutil.copytree(adapters.paths[name], made / name)
    return made


@pytest.mark.anyio
async def test_adapters_are_models(adapters, folder):
    async with served(adapters, folder) as (client, _):
        expected = {name: adapters.expected[name].tokens for name in ("all", "rslora", None)}
        for name in ("all", "rslora"):
            assert await tokens(client, name) == expected[name]
        assert await tokens(client, "base") == expected[None]
        assert await tokens(client, "base", adapter="all") == expected["all"]
        assert await tokens(client, "base", adapters=[{"name": "rslora"}]) == expected["rslora"]
        assert (
            await tokens(client, "all", use_beam_search=True, beam_width=2, n=2) != expected[None]
        )
        cards = {one["id"]: one for one in (await client.get("/v1/models")).json()["data"]}
        assert list(cards) == ["base", "all", "rslora"]
        assert (cards["all"]["parent"], cards["base"]["parent"]) == ("base", None)
        assert cards["all"]["root"] == str(folder / "all")
        assert (await client.get("/v1/models/rslora")).json() == cards["rslora"]
        answer = await client.post("/v1/completions", json={**BODY, "model": "al"})
        assert answer.status_code == 404
        assert "This server has 'base', 'all', 'rslora'" in answer.text
        chat = {"model": "all", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/messages", chat),
            ("/v1/responses", {"model": "all", "input": "x", "max_output_tokens": 16}),
            ("/api/chat", {"model": "all", "messages": chat["messages"], "stream": False}),
        ):
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == "all"


@pytest.mark.anyio
async def test_operators_load_and_unload(adapters, folder):
    shutil.move(folder / "rslora", folder / ".hidden")
    async with served(adapters, folder) as (client, _):

        async def post(path, status, text, **body):
            answer = await client.post(f"/v1/{path}_lora_adapter", json=body)
            assert answer.status_code == status, answer.text
            assert text in answer.text

        load = {"lora_name": "new", "lora_path": ".hidden"}
        await post("load", 200, "Success: LoRA adapter 'new' added successfully.", **load)
        assert await tokens(client, "new") == adapters.expected["rslora"].tokens
        await post("load", 400, "'new' is loaded. Give load_inplace", **load)
        load["lora_path"] = "all"
        # A stream goes on, and new requests have the new contents.
        running = asyncio.create_task(tokens(client, "new", max_tokens=60))
        await asyncio.sleep(0.01)
        await post("load", 200, "Success", **load, load_inplace=True)
        assert await tokens(client, "new") == adapters.expected["all"].tokens
        assert (await running)[:8] == adapters.expected["rslora"].tokens
        await post("unload", 200, "Success: LoRA adapter 'new' removed", lora_name="new")
        await post("unload", 404, "There is no adapter 'new'", lora_name="new")
        answer = await client.post("/v1/completions", json={**BODY, "model": "new"})
        assert answer.status_code == 404
        for path, wrong in (
            ("../outside", "is not in the folder of adapters"),
            ("/etc", "is not in the folder of adapters"),
            (".", "is not in the folder of adapters"),
            ("nowhere", "there is no folder"),
        ):
            await post("load", 400, wrong, lora_name="other", lora_path=path)
        await post("load", 400, "the model has this name", lora_name="base", lora_path="all")
        wide = folder / "wide"
        adapters.save(wide, r=8, target_modules=["q_proj"])
        (wide / "adapter_model.safetensors").write_bytes(
            (folder / "all" / "adapter_model.safetensors").read_bytes()
        )
        await post("load", 400, "needs [8, 96]", lora_name="other", lora_path="wide")
        assert await tokens(client, "all") == adapters.expected["all"].tokens
        cards = (await client.get("/v1/models")).json()["data"]
        assert [one["id"] for one in cards] == ["base", "all"]


@pytest.mark.anyio
async def test_a_folder_that_comes_later_is_found(adapters, folder):
    later = shutil.move(folder / "rslora", folder.parent / "rslora")
    async with served(adapters, folder) as (client, _):
        answer = await client.post("/v1/completions", json={**BODY, "model": "rslora"})
        assert answer.status_code == 404
        shutil.move(later, folder / "rslora")
        assert await tokens(client, "rslora") == adapters.expected["rslora"].tokens
        answer = await client.post("/v1/completions", json={**BODY, "model": "../adapters/all"})
        assert answer.status_code == 404
