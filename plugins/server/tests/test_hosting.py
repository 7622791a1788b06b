"""A server in the event loop of a host program."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, EngineDeadError
from toolkit_lm_server.hosting import HostedServer
from toolkit_lm_server.options import ServerOptions

pytestmark = pytest.mark.anyio
ENGINE = {
    "model": "tiny",
    "device": "cpu",
    "dtype": "float32",
    "num_kv_blocks": 64,
    "max_model_len": 256,
    "engine_process": False,
}
COMPLETE = {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def hosted(**options) -> HostedServer:
    return HostedServer(
        VllmConfig.make(**ENGINE), ServerOptions(host="127.0.0.1", port=0, **options)
    )


async def test_it_serves_within_its_context():
    with LLM(**ENGINE) as llm:
        params = SamplingParams(max_tokens=5, temperature=0)
        [expected] = llm.generate(COMPLETE["prompt"], params, use_tqdm=False)
    async with httpx.AsyncClient(timeout=60) as client:
        async with hosted(ui=False) as server:
            server.check()
            answer = await client.post(f"{server.url}/v1/completions", json=COMPLETE)
            assert answer.json()["choices"][0]["text"] == expected.outputs[0].text
            assert server.metrics.totals.output == 5
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{server.url}/health")
        with pytest.raises(EngineDeadError, match="the engine's server has ended"):
            server.check()


async def test_an_engine_that_does_not_start_says_why():
    server = HostedServer(
        VllmConfig.make(**ENGINE | {"model": "/nowhere"}), ServerOptions(host="127.0.0.1", port=0)
    )
    with pytest.raises(CheckpointError, match="/nowhere"):
        async with server:
            pass


async def test_an_engine_that_dies_is_told_of_and_closed(make_engine):
    closed = []
    engine = make_engine()
    engine.close = lambda: closed.append(True)
    engine.wait_ready = lambda: asyncio.sleep(0)
    server = hosted(ui=False)
    server._parts = server._parts._replace(make=lambda: engine)
    with pytest.raises(EngineDeadError, match="the engine has died"):
        async with server:
            server.check()
            engine.status = "dead"
            engine.error = RuntimeError("a step is broken")
            await asyncio.wait([server._serving])
            with pytest.raises(EngineDeadError, match="the engine has died"):
                server.check()
    assert closed == [True]
