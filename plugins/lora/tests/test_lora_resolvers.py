"""Where adapters come from: the folder, other plugins' resolvers, and what of it a key may have."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
import types

import pytest
from lora_served import BODY, ROOT, THREADS, figures, post, served, tokens
from safetensors.torch import load_file, save_file
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.errors import ConfigError
from toolkit_lm.plugin import Plugins
from toolkit_lm_lora.flags import translate_flags
from toolkit_lm_lora.front import LoraRequests
from toolkit_lm_lora.resolvers import AdapterResolverRegistry, FolderResolver
from toolkit_lm_lora.share import Counts

PAGE = ROOT / "docs" / "hooks" / "toolkit_register_adapter_resolvers.md"


def test_toolkit_register_adapter_resolvers(monkeypatch, tmp_path):
    plugin, shown = (types.ModuleType(name) for name in ("example", "shown"))
    for block, module in ((2, plugin), (3, shown)):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        text = PAGE.read_text(encoding="utf-8").split("```python\n")[block].split("```")[0]
        exec(text.replace("/srv/adapters", str(tmp_path)), module.__dict__)
    registry = Plugins.load(extra=[plugin]).brought_registry(AdapterResolverRegistry)
    assert registry.keys() == ["folder", "mine"]
    assert registry.get("mine").target == "toolkit_lm_mine.resolver:MyResolver"
    made = shown.MyResolver(VllmConfig.make(model="tiny"), options=None)
    (tmp_path / "a").mkdir()
    assert made.resolve("mine-a") == tmp_path / "a"
    assert made.resolve("mine-b") is made.resolve("mine-..") is made.resolve("mine-a/..") is None
    assert made.may_have("mine-b") and not made.may_have("a") and made.names() == ()


@pytest.mark.anyio
async def test_another_plugins_resolver(two_adapters, tmp_path):
    """It is asked for names that are not registered; its exceptions have the status 503."""
    catalog = tmp_path / "catalog"
    body = {**BODY, "model": "other"}
    async with served(two_adapters, {"enabled": True}, catalog) as (client, _):
        answer = await post(client, "/v1/completions", 503, "FileNotFoundError", **body)
        assert "the adapter resolver 'catalog' has failed" in answer.text
        assert answer.json()["error"]["code"] == "adapter_resolver_failed"
        assert "retry-after" in answer.headers
        catalog.write_text(f"other {two_adapters.paths['rslora']}\nbad /nowhere\n")
        assert (await client.get("/v1/models/other")).status_code == 404
        answer = await post(client, "/v1/completions", 200, **body)
        found = answer.json()["choices"][0]["token_ids"]
        assert found == two_adapters.expected["rslora"].tokens
        assert (await client.get("/v1/models/other")).json()["parent"] == "base"
        answer = await post(
            client, "/v1/completions", 404, "'nobody'", **body | {"model": "nobody"}
        )
        assert "Known: other." in answer.text
        assert answer.json()["error"]["code"] == "model_not_found"
        await post(client, "/v1/completions", 404, "'nobody'", **BODY, adapter="nobody")
        await post(client, "/v1/completions", 503, "no folder", **BODY, adapter="bad")
        await post(client, "/v1/unload_lora_adapter", 200, lora_name="other")
        await post(client, "/v1/completions", 404, **body)


def test_folders_that_lead_out_are_no_adapters(folder, tmp_path):
    outside = shutil.copytree(folder / "all", tmp_path / "outside")
    os.symlink(outside, folder / "link")
    shutil.copytree(folder / "all", folder / "half")
    (folder / "half" / "adapter_model.safetensors").unlink()
    os.symlink(outside / "adapter_model.safetensors", folder / "half" / "adapter_model.safetensors")
    os.symlink(folder / "all", folder / "inner")
    resolver = FolderResolver(
        VllmConfig.make(model="tiny"), options=types.SimpleNamespace(folder=str(folder))
    )
    assert resolver.names() == ["all", "inner", "rslora"]
    for name in (
        "link",
        "half",
        "../outside",
        ".",
        "..",
        "",
        "a\0b",
        "x" * 5000,
        str(outside),
        str(folder / "all"),
    ):
        assert resolver.resolve(name) is None, name
    assert resolver.resolve("inner") == folder / "inner"


def write_keys(path):
    keys = [
        {"name": "alice", "key": "A", "adapters": ["all", "alice-*"]},
        {"name": "bob", "key": "B", "adapters": ["rslora"]},
        {"name": "none", "key": "N", "adapters": []},
        {"name": "operator", "key": "O"},
    ]
    path.write_text(json.dumps({"keys": keys}))
    return path


@pytest.mark.anyio
async def test_keys_limited_to_adapters(two_adapters, folder, tmp_path):
    """No route and no error tells a key of the adapters of another, or lets it use them."""
    keys = write_keys(tmp_path / "keys.yaml")
    shutil.copytree(folder / "all", folder / "alice-new")
    async with served(two_adapters, {"folder": str(folder)}, keys=keys) as (client, _):

        async def models(key):
            answer = await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            return [one["id"] for one in answer.json()["data"]]

        assert await models("A") == ["base", "alice-new", "all"]
        assert await models("B") == ["base", "rslora"]
        assert await models("N") == ["base"]
        assert await models("O") == ["base", "alice-new", "all", "rslora"]
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        for path, body in (
            ("/v1/completions", BODY),
            ("/v1/chat/completions", chat),
            ("/v1/responses", {"input": "x", "max_output_tokens": 16}),
            ("/v1/messages", chat),
            ("/v2/chat", chat),
            ("/api/chat", {"messages": chat["messages"], "stream": False}),
            ("/api/generate", {"prompt": "x", "stream": False}),
            ("/tokenize", {"prompt": "x"}),
        ):
            answer = await post(client, path, 404, key="B", **body, model="all")
            assert "'rslora'" in answer.text and "alice" not in answer.text
            assert (await post(client, path, 404, key="N", **body, model="all")).text.count(
                "all"
            ) == 1
        for fields in ({"adapter": "all"}, {"adapters": [{"name": "all"}]}):
            answer = await post(
                client, "/v1/completions", 404, "Known: rslora.", "B", **BODY, **fields
            )
            await post(client, "/v1/completions", 200, key="A", **BODY, **fields)
        await post(client, "/v1/completions", 200, key="B", **BODY, model="rslora")
        card = await client.get("/v1/models/all", headers={"authorization": "Bearer B"})
        assert card.status_code == 404 and "alice" not in card.text
        for unload in ("/v1/unload_lora_adapter", "/unload_lora_adapter"):
            answer = await post(client, unload, 404, "'all'", "B", lora_name="all")
            assert "Known: rslora." in answer.text
        for load in ("/v1/load_lora_adapter", "/load_lora_adapter"):
            await post(client, load, 400, "may not", "B", lora_name="mine", lora_path="rslora")
            for path in ("rslora", "all/../rslora", "rslora/."):
                await post(client, load, 400, "no folder", "A", lora_name="alice-x", lora_path=path)
        loaded = {"lora_name": "alice-x", "lora_path": "all", "pinned": True}
        answer = await post(client, "/load_lora_adapter", 200, key="A", **loaded)
        assert sorted(answer.json()["loaded_adapters"]) == ["alice-new", "alice-x", "all"]
        assert "alice-x" not in await models("B")
        await post(client, "/v1/completions", 404, key="B", **BODY, model="alice-x")
        answer = await post(client, "/unload_lora_adapter", 200, key="A", lora_name="alice-x")
        assert "alice-x" not in answer.json()["loaded_adapters"]


@pytest.mark.anyio
async def test_figures(two_adapters, folder, tmp_path):
    keys = write_keys(tmp_path / "keys.yaml")
    own = {"folder": str(folder), "max_host_adapters": 1, "max_adapters": 1}
    async with served(two_adapters, own, keys=keys) as (client, _):
        info, numbers = await figures(client, "O")
        assert 'max_lora="1"' in info and info.startswith("vllm:lora_requests_info{")
        assert numbers["registered"] == 2 and numbers["resident"] == numbers["loads_total"] == 0
        running = asyncio.create_task(
            post(client, "/v1/completions", 200, key="A", **BODY | {"max_tokens": 90}, model="all")
        )
        end = time.monotonic() + 30
        while 'running_lora_adapters="all"' not in info and time.monotonic() < end:
            await asyncio.sleep(0.005)
            info, numbers = await figures(client, "A")
        assert 'running_lora_adapters="all"' in info and 'waiting_lora_adapters=""' in info
        assert 'running_lora_adapters=""' in (await figures(client, "B"))[0]
        await running
        for model in ("all", "rslora", "all"):
            await post(client, "/v1/completions", 200, key="O", **BODY, model=model)
        info, numbers = await figures(client, "O")
        assert 'running_lora_adapters=""' in info
        assert numbers["hits_total"] >= 1 and numbers["loads_total"] >= 2
        assert numbers["resident"] >= 1 and numbers["resident_bytes"] > 0
        assert numbers["load_seconds_total"] > 0
        # A limited key is not told how many adapters of others there are.
        assert (await figures(client, "A"))[1]["registered"] == 1
        for key in ("A", "N"):
            _, numbers = await figures(client, key)
            assert {*numbers} == {"registered", "resident", "resident_bytes"}
        assert numbers["registered"] == numbers["resident"] == numbers["resident_bytes"] == 0


@pytest.mark.anyio
async def test_what_is_refused_is_not_in_memory(two_adapters, folder):
    """Neither files over the limit, nor what fails half-way. Others are unharmed."""
    size = max((folder / name / "adapter_model.safetensors").stat().st_size for name in ("all",))
    own = {"folder": str(folder), "max_file_gib": (size + 1) / 2**30, "max_rank": 8}
    big = two_adapters.save(folder / "big", r=8, target_modules="all-linear")
    assert (big / "adapter_model.safetensors").stat().st_size > size
    (two_adapters.save(folder / "wide", r=16, target_modules=["q_proj"], layers_to_transform=[0]))
    async with served(two_adapters, own) as (client, _):
        load = "/v1/load_lora_adapter"
        await post(client, load, 400, "max_file_gib", lora_name="x", lora_path="big")
        await post(client, "/v1/completions", 400, "max_file_gib", **BODY, model="big")
        await post(client, load, 400, "max_rank", lora_name="x", lora_path="wide")
        (folder / "late").mkdir()
        await post(client, load, 400, "cannot be read", lora_name="x", lora_path="late")
        _, numbers = await figures(client)
        assert numbers["resident"] == 0
        await post(client, load, 200, lora_name="x", lora_path="all", pin=True)
        await post(client, "/v1/completions", 200, **BODY, model="x")
        _, numbers = await figures(client)
        assert numbers["resident"] == 1


@pytest.mark.anyio
async def test_what_one_stage_refuses_is_in_no_memory(two_adapters, folder):
    """A load fails half-way: the first stage has read its share, and drops it."""
    two_adapters.save(folder / "half", target_modules=["q_proj"])
    weights = folder / "half" / "adapter_model.safetensors"
    found = load_file(weights)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    save_file({**found, name: found[name][:2].contiguous()}, weights)
    engine = {"executor": "threads", "pipeline_parallel_size": 2}
    own = {"folder": str(folder)}
    async with served(two_adapters, own, extra=[THREADS], engine=engine) as (client, running):
        load = "/v1/load_lora_adapter"
        await post(client, load, 400, "needs [64, 4]", lora_name="x", lora_path="half")
        await post(client, "/v1/completions", 404, "'x'", **BODY, model="x")
        counts = await running.call_workers("lora.counts", None, Counts)
        assert [each.resident for each in counts] == [{}, {}]
        await post(client, load, 200, lora_name="x", lora_path="all")
        assert await tokens(client, "x") == two_adapters.expected["all"].tokens


def test_a_thousand_registered_adapters_cost_nothing_at_the_start(two_adapters, tmp_path):
    """Files are read when a request names them."""
    root = tmp_path / "many"
    for number in range(1000):
        (root / f"a{number}").mkdir(parents=True)
        for path in two_adapters.paths["all"].iterdir():
            os.link(path, root / f"a{number}" / path.name)
    plugins = Plugins.load(PluginsConfig(plugin_option={"lora": {"folder": str(root)}}))
    start = time.thread_time()
    made = LoraRequests(VllmConfig.make(model="tiny"), options=plugins.options("lora"))
    made.plugins = plugins
    assert len(made.resolvers) == 1 and len(made.adapters) == 1000
    assert time.thread_time() - start < 1
    assert made.adapters["a7"].known_digest is None
    assert made.adapters["a7"].folder.digest == made.adapters["a8"].folder.digest


def test_flags():
    assert translate_flags(
        ["tiny", "--lora-dir", "x", "--lora-pin=a,b", "--lora-merge", "f"], ()
    ) == [
        "tiny",
        *("--plugin-option", "lora.folder=x"),
        *("--plugin-option", "lora.pinned=a,b"),
        *("--plugin-option", "lora.merge=f"),
    ]
    assert translate_flags(["--", "--lora-dir"], ()) == ["--", "--lora-dir"]
    for words in (["--lora-dir"], ["--lora-dir", "--port"], ["--lora-pin="]):
        with pytest.raises(ConfigError, match="needs a value"):
            translate_flags(words, ())
