"""Adapters over HTTP: as models, loaded and unloaded by operators."""

from __future__ import annotations

import asyncio
import shutil

import pytest
from lora_served import BODY, served, tokens


@pytest.mark.anyio
async def test_adapters_are_models(two_adapters, folder):
    async with served(two_adapters, {"folder": str(folder)}) as (client, _):
        expected = {name: two_adapters.expected[name].tokens for name in ("all", "rslora", None)}
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
async def test_operators_load_and_unload(two_adapters, folder):
    shutil.move(folder / "rslora", folder / ".hidden")
    async with served(two_adapters, {"folder": str(folder)}) as (client, _):

        async def post(path, status, text, **body):
            answer = await client.post(f"/v1/{path}_lora_adapter", json=body)
            assert answer.status_code == status, answer.text
            assert text in answer.text

        load = {"lora_name": "new", "lora_path": ".hidden"}
        await post("load", 200, "Success: LoRA adapter 'new' added successfully.", **load)
        assert await tokens(client, "new") == two_adapters.expected["rslora"].tokens
        await post("load", 400, "'new' is loaded. Give load_inplace", **load)
        load["lora_path"] = "all"
        # A stream goes on, and new requests have the new contents.
        running = asyncio.create_task(tokens(client, "new", max_tokens=60))
        await asyncio.sleep(0.01)
        await post("load", 200, "Success", **load, load_inplace=True)
        assert await tokens(client, "new") == two_adapters.expected["all"].tokens
        assert (await running)[:8] == two_adapters.expected["rslora"].tokens
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
        two_adapters.save(wide, r=8, target_modules=["q_proj"])
        (wide / "adapter_model.safetensors").write_bytes(
            (folder / "all" / "adapter_model.safetensors").read_bytes()
        )
        await post("load", 400, "needs [8, 96]", lora_name="other", lora_path="wide")
        assert await tokens(client, "all") == two_adapters.expected["all"].tokens
        cards = (await client.get("/v1/models")).json()["data"]
        assert [one["id"] for one in cards] == ["base", "all"]


@pytest.mark.anyio
async def test_a_folder_that_comes_later_is_found(two_adapters, folder):
    later = shutil.move(folder / "rslora", folder.parent / "rslora")
    async with served(two_adapters, {"folder": str(folder)}) as (client, _):
        answer = await client.post("/v1/completions", json={**BODY, "model": "rslora"})
        assert answer.status_code == 404
        shutil.move(later, folder / "rslora")
        assert await tokens(client, "rslora") == two_adapters.expected["rslora"].tokens
        answer = await client.post("/v1/completions", json={**BODY, "model": "../adapters/all"})
        assert answer.status_code == 404
