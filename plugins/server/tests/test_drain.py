"""A server that is stopped: what it says, what it still serves, and for how long."""

from __future__ import annotations

import asyncio
import logging

import httpx
import pytest
from toolkit_lm.errors import EngineDeadError
from toolkit_lm_server.app import create_app
from toolkit_lm_server.lifecycle import Lifecycle
from toolkit_lm_server.listening import bind
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.threads import in_thread

pytestmark = pytest.mark.anyio
COMPLETE = {"prompt": "abc", "max_tokens": 2}


@pytest.fixture
def lifecycle(make_engine):
    """lifecycle(**options): a server of a scripted engine, which is ready at once, and its URL."""

    listeners = []

    def make(**options):
        engine = make_engine()
        engine.close = lambda: None
        engine.wait_ready = lambda: asyncio.sleep(0)
        server = ServerOptions(ui=False, **options)

        def make_app(engine, metrics, readiness, keys):
            return create_app(engine, server, metrics=metrics, readiness=readiness, keys=keys)

        listener = bind("127.0.0.1", 0)
        listeners.append(listener)
        made = Lifecycle(in_thread(lambda: engine), make_app, server, Metrics(), listener)
        return made, f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield make
    for listener in listeners:
        listener.close()


async def until_answered(client: httpx.AsyncClient, url: str, status: int) -> None:
    while (await client.get(f"{url}/health")).status_code != status:
        await asyncio.sleep(0.01)


async def test_balancers_are_told_first(lifecycle, caplog):
    """/health is 503 while requests are served yet; then they are refused."""
    caplog.set_level(logging.INFO)
    server, url = lifecycle(drain_delay=3600, shutdown_timeout=5)
    running = asyncio.create_task(server.run())
    async with httpx.AsyncClient() as client:
        await until_answered(client, url, 200)
        server._stopped = True
        await until_answered(client, url, 503)
        assert (await client.get(f"{url}/health")).json() == {"status": "draining"}
        for _ in range(2):
            answer = await client.post(f"{url}/v1/completions", json=COMPLETE)
            assert answer.status_code == 200
        assert not running.done()
        # An engine that dies has nothing left to serve.
        server._readiness.engine.status = "dead"
        await running
    told = [record for record in caplog.records if record.message.startswith("Stop")]
    assert [record.message.partition(":")[0][:7] for record in told] == ["Stoppin", "Stopped"]
    assert "new ones are refused in 3600 s, all end in 3605 s" in told[0].message
    assert told[1].fields["num_requests"] == 0 and told[1].fields["seconds"] < 3600


async def test_without_a_delay_it_ends_at_once(lifecycle):
    server, url = lifecycle()
    running = asyncio.create_task(server.run())
    async with httpx.AsyncClient() as client:
        await until_answered(client, url, 200)
    server._stopped = True
    await asyncio.wait_for(running, 60)
    assert server._readiness.draining


async def test_a_host_starts_and_stops_it(lifecycle):
    """Without signals: it is started when the engine is ready, and what keeps the engine from
    starting is raised."""
    server, url = lifecycle(shutdown_timeout=5)
    serving = await server.start()
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{url}/health")).status_code == 200
    server.stop()
    await serving

    server, url = lifecycle()
    server._making.result().wait_ready = failing
    with pytest.raises(EngineDeadError, match="it has no weights"):
        await server.start()


async def failing():
    raise EngineDeadError("it has no weights")
