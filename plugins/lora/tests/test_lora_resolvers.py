"""Where adapters come from: the folder, other plugins' resolvers, and what of it a key may have."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shutil
import sys
import time
import types
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from lora_adapters import FORMS, PROMPT, Adapters
from toolkit_lm import AsyncLLM
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.errors import ConfigError
from toolkit_lm.plugin import Plugins
from toolkit_lm_lora.flags import translate_flags
from toolkit_lm_lora.front import LoraRequests
from toolkit_lm_lora.resolvers import AdapterResolverRegistry, FolderResolver
from toolkit_lm_server.app import create_app
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "hooks" / "toolkit_register_adapter_resolvers.md"
sys.path.insert(0, str(ROOT / "tests" / "plugins" / "adapter_catalog"))
CATALOG = importlib.import_module("adapter_catalog")
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
    return Adapters(tmp_path_factory.mktemp("resolvers"), "llama", forms)


@pytest.fixture
def folder(adapters, tmp_path):
    made = tmp_path / "adapters"
    for name in ("all", "rslora"):
        shutil.copytree(adapters.paths[name], made / name)
    return made


@asynccontextmanager
async def served(adapters, own, catalog="", keys=None, **server):
    """A client of an app with metrics, and its engine."""
    options = {"lora": own, "adapter_catalog": {"file": str(catalog)}}
    plugins = Plugins.load(PluginsConfig(plugin_option=options), extra=[CATALOG])
    config = VllmConfig.make(
        model=str(adapters.checkpoint),
        engine_process=False,
        num_kv_blocks=256,
        block_size=16,
        max_model_len=128,
        dtype="float32",
        served_model_name=["base"],
        plugin_option=options,
    )
    if keys is not None:
        server["api_keys_file"] = str(keys)
    async with AsyncLLM(config=config, plugins=plugins) as engine:
        metrics = Metrics(names="vllm")
        app = create_app(engine, ServerOptions(admin_routes=True, **server), metrics=metrics)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            yield client, engine


async def post(client, path, status, text="", key=None, **body):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    answer = await client.post(path, json=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert text in answer.text
    return answer


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
async def test_another_plugins_resolver(adapters, tmp_path):
    """It is asked for names that are not registered; its exceptions have the status 503."""
    catalog = tmp_path / "catalog"
    body = {**BODY, "model": "other"}
    async with served(adapters, {"enabled": True}, catalog) as (client, _):
        answer = await post(client, "/v1/completions", 503, "FileNotFoundError", **body)
        assert "the adapter resolver 'catalog' has failed" in answer.text
        assert answer.json()["error"]["code"] == "adapter_resolver_failed"
        assert "retry-after" in answer.headers
        catalog.write_text(f"other {adapters.paths['rslora']}\nbad /nowhere\n")
        assert (await client.get("/v1/models/other")).status_code == 404
        answer = await post(client, "/v1/completions", 200, **body)
        found = answer.json()["choices"][0]["token_ids"]
        assert found == adapters.expected["rslora"].tokens
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
    for name in ("link", "half", "../outside", ".", "..", "", "a\0b", "x" * 5000, str(outside)):
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
async def test_keys_limited_to_adapters(adapters, folder, tmp_path):
    """No route and no error tells a key of the adapters of another, or lets it use them."""
    keys = write_keys(tmp_path / "keys.yaml")
    shutil.copytree(folder / "all", folder / "alice-new")
    async with served(adapters, {"folder": str(folder)}, keys=keys) as (client, _):

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


async def figures(client, key=None):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    text = (await client.get("/metrics", headers=headers)).text
    lines = [line for line in text.splitlines() if "lora" in line and line[0] != "#"]
    [info] = [line for line in lines if "requests_info" in line]
    numbers = {
        line.partition("{")[0].removeprefix("toolkit_lm_lora_"): float(line.split()[-1])
        for line in lines
        if line is not info and "_created" not in line
    }
    return info, numbers


@pytest.mark.anyio
async def test_figures(adapters, folder, tmp_path):
    keys = write_keys(tmp_path / "keys.yaml")
    own = {"folder": str(folder), "max_host_adapters": 1, "max_adapters": 1}
    async with served(adapters, own, keys=keys) as (client, _):
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


@pytest.mark.anyio
async def test_what_is_refused_is_not_in_memory(adapters, folder):
    """Neither files over the limit, nor what fails half-way. Others are unharmed."""
    size = max((folder / name / "adapter_model.safetensors").stat().st_size for name in ("all",))
    own = {"folder": str(folder), "max_file_gib": (size + 1) / 2**30, "max_rank": 8}
    big = adapters.save(folder / "big", r=8, target_modules="all-linear")
    assert (big / "adapter_model.safetensors").stat().st_size > size
    (adapters.save(folder / "wide", r=16, target_modules=["q_proj"], layers_to_transform=[0]))
    async with served(adapters, own) as (client, _):
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


def test_a_thousand_registered_adapters_cost_nothing_at_the_start(adapters, tmp_path):
    """Files are read when a request names them."""
    root = tmp_path / "many"
    for number in range(1000):
        (root / f"a{number}").mkdir(parents=True)
        for path in adapters.paths["all"].iterdir():
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
    assert translate_flags(["tiny", "--lora-dir", "x", "--lora-pin=a,b"], ()) == [
        "tiny",
        *("--plugin-option", "lora.folder=x"),
        *("--plugin-option", "lora.pinned=a,b"),
    ]
    assert translate_flags(["--", "--lora-dir"], ()) == ["--", "--lora-dir"]
    for words in (["--lora-dir"], ["--lora-dir", "--port"], ["--lora-pin="]):
        with pytest.raises(ConfigError, match="needs a value"):
            translate_flags(words, ())
