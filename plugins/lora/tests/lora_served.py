"""An app with adapters, and its client."""

from __future__ import annotations

import importlib
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
from lora_adapters import PROMPT, Adapters
from toolkit_lm import AsyncLLM
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.plugin import Plugins
from toolkit_lm_server.app import create_app
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tests" / "plugins" / "adapter_catalog"))
CATALOG = importlib.import_module("adapter_catalog")
sys.path.insert(0, str(ROOT / "tests" / "plugins" / "threads"))
THREADS = importlib.import_module("toolkit_lm_threads")
BODY = {
    "prompt": PROMPT,
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


@asynccontextmanager
async def served(
    adapters: Adapters,
    own: Mapping[str, Any],
    catalog: str | Path = "",
    keys: Path | None = None,
    extra: Sequence[object] = (),
    engine: Mapping[str, Any] = MappingProxyType({}),
    **server: Any,
) -> AsyncIterator[tuple[httpx.AsyncClient, AsyncLLM]]:
    """A client of an app with routes of operators and metrics, and its engine. `own`: options of
    the plugin lora. `catalog`: file of the resolver in tests/plugins. `extra`: further plugins.
    `engine`: further options of the engine."""
    options = {"lora": dict(own)}
    if catalog:
        options["adapter_catalog"] = {"file": str(catalog)}
    loaded = [*extra, *([CATALOG] if catalog else [])]
    plugins = Plugins.load(PluginsConfig(plugin_option=options), extra=loaded)
    config = VllmConfig.make(
        model=str(adapters.checkpoint),
        engine_process=False,
        num_kv_blocks=256,
        block_size=16,
        max_model_len=128,
        dtype="float32",
        served_model_name=["base"],
        plugin_option=options,
        **engine,
    )
    if keys is not None:
        server["api_keys_file"] = str(keys)
    async with AsyncLLM(config=config, plugins=plugins) as running:
        metrics = Metrics()
        app = create_app(running, ServerOptions(admin_routes=True, **server), metrics=metrics)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            yield client, running


async def post(
    client: httpx.AsyncClient,
    path: str,
    status: int,
    text: str = "",
    key: str | None = None,
    **body: Any,
) -> httpx.Response:
    """An answer with this status and text."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    answer = await client.post(path, json=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert text in answer.text
    return answer


async def tokens(client: httpx.AsyncClient, model: str, **fields: Any) -> list[int]:
    """Tokens of a completion, of the model or of an adapter."""
    body = (await post(client, "/v1/completions", 200, **BODY | {"model": model} | fields)).json()
    assert body["model"] == model
    found: list[int] = body["choices"][0]["token_ids"]
    return found


async def figures(
    client: httpx.AsyncClient, key: str | None = None
) -> tuple[str, dict[str, float]]:
    """vLLM's figure of adapters, and our own by name."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    text = (await client.get("/metrics", headers=headers)).text
    lines = [line for line in text.splitlines() if "lora" in line and line[0] != "#"]
    [info] = [line for line in lines if line.startswith("vllm:lora_requests_info")]
    numbers = {
        line.partition("{")[0].removeprefix("toolkit_lm_lora_"): float(line.split()[-1])
        for line in lines
        if "requests_info" not in line and "_created" not in line
    }
    return info, numbers
