"""What the page of figures and `toolkit explain` say of the tiers."""

from __future__ import annotations

import asyncio
import re

import httpx
import torch
from toolkit_lm import AsyncLLM
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.plugin import Plugins
from toolkit_lm_cli import run
from toolkit_lm_devkit import randomize
from toolkit_lm_server.app import create_app
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from transformers import Qwen2Config, Qwen2ForCausalLM

SHAPE = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
BODY = {"prompt": [*range(3, 53)], "max_tokens": 4, "temperature": 0}


def make(folder):
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, dtype="float32")).eval()
    randomize(model, 0)
    model.save_pretrained(folder)
    return folder


async def figures(model, own):
    """Each figure of a tier after one completion, by its name and labels."""
    metrics = Metrics(model_name="tiny")
    option = {"kv_disk": own}
    plugins = Plugins.load(PluginsConfig(plugin_option=option), extra=[metrics])
    config = VllmConfig.make(
        model=str(model),
        engine_process=False,
        renderer="tokens",
        dtype="float32",
        max_model_len=64,
        num_kv_blocks=32,
        plugin_option=option,
    )
    async with AsyncLLM(config, plugins=plugins) as llm:
        await llm.wait_ready()
        app = create_app(llm, ServerOptions(), metrics=metrics)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            answer = await client.post("/v1/completions", json=BODY)
            assert answer.status_code == 200, answer.text
            text = (await client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("toolkit_lm_kv_tier_")]
    return {
        re.sub(r'model_name="[^"]*",', "", line.rpartition(" ")[0]): float(line.rpartition(" ")[2])
        for line in lines
    }


def test_figures_of_a_restored_prefix(tmp_path):
    model = make(tmp_path / "model")
    own = {"dir": str(tmp_path / "kv"), "host": "1MiB", "loads": "always"}
    cold = asyncio.run(figures(model, own))
    restored = asyncio.run(figures(model, own))
    loaded = 'toolkit_lm_kv_tier_loads_total{outcome="loaded",tier="kv_disk"}'
    assert (cold[loaded], restored[loaded]) == (0, 1)
    num_bytes = 3 * 2 * 2 * 16 * 2 * 16 * 4
    assert restored['toolkit_lm_kv_tier_loaded_bytes_total{tier="kv_disk"}'] == num_bytes
    assert restored['toolkit_lm_kv_tier_load_seconds_total{tier="kv_disk"}'] > 0
    assert restored['toolkit_lm_kv_tier_held_blocks{tier="kv_disk"}'] == 3
    assert restored['toolkit_lm_kv_tier_held_bytes{tier="kv_disk"}'] > num_bytes
    assert restored['toolkit_lm_kv_tier_stored_blocks_total{tier="kv_disk"}'] == 0
    assert restored['toolkit_lm_kv_tier_held_blocks{tier="kv_host"}'] == 0
    missed = 'toolkit_lm_kv_tier_misses_total{reason="absent",tier="kv_disk"}'
    assert (cold[missed], restored[missed]) == (1, 0)
    assert restored['toolkit_lm_kv_tier_lost_blocks_total{tier="kv_disk"}'] == 0


def test_without_a_tier_there_is_nothing_to_see(tmp_path):
    assert asyncio.run(figures(make(tmp_path / "model"), {})) == {}


def test_explain_shows_the_sizes(tmp_path, capsys):
    model = make(tmp_path / "model")
    words = ["explain", str(model), "--kv-cache-dir", str(tmp_path / "kv"), "--renderer", "tokens"]
    assert run([*words, "--kv-cache-disk", "2GiB", "--kv-cache-host=1GiB"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "kv_host: at most 1.00 GiB" in text
    assert "kv_disk: at most 2.00 GiB" in text
    assert not (tmp_path / "kv").exists()
