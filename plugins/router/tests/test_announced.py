"""Backends that announce themselves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from toolkit_lm_router import routing
from toolkit_lm_router.options import RouterOptions
from toolkit_lm_router.routing import Routing

pytestmark = pytest.mark.anyio


async def test_backends_come_leave_and_fall_silent(make_stub, monkeypatch):
    now = 100.0
    monkeypatch.setattr(routing, "time", SimpleNamespace(monotonic=lambda: now))
    stubs = [make_stub() for _ in range(3)]
    for stub in stubs:
        await stub.start()
    first, second, third = (stub.url for stub in stubs)
    try:
        async with Routing(RouterOptions(health_interval=3600)) as made:
            for url in (first, second, third):
                # It is asked at once, and so gets requests.
                assert await made.announce(url) == 0
                assert made.fleet.backends[url].is_ready
            made.leave(third)
            made.leave(third)
            assert [*made.fleet.backends] == [first, second]
            now += 20
            await made.announce(second)
            assert [*made.fleet.backends] == [first, second]
            now += 20
            await made.announce(second)
            # It answers: only those that tell of it are silent.
            assert [*made.fleet.backends] == [first, second]
            stubs[0].health = 503
            await made.watch.check(made.fleet.backends[first])
            await made.announce(second)
            assert [*made.fleet.backends] == [second]
            stubs[0].health = 200
            await made.announce(first)
            assert made.fleet.num_ready(None) == 2
    finally:
        for stub in stubs:
            await stub.stop()
