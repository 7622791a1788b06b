"""Several routers in front of the same backends: what they decide alike, and what one of them
cannot do."""

from __future__ import annotations

import asyncio
import re
from collections import Counter

import httpx
import pytest
from toolkit_lm.errors import ConfigError
from toolkit_lm_router.fleet import Fleet
from toolkit_lm_router.options import RouterOptions
from toolkit_lm_router.policy import Wanted
from toolkit_lm_router.publishing import publishing
from toolkit_lm_router.routing import Routing

pytestmark = pytest.mark.anyio
URLS = [f"http://10.0.0.{number}:8000" for number in range(4)]


def fleet(urls: list[str], *, has_peers: bool = True) -> Fleet:
    """A router's backends, in the order in which it heard of them."""
    made = Fleet(RouterOptions(backend=urls), has_peers=has_peers)
    for backend in made.backends.values():
        made.set_state(backend, "ready")
    return made


def homes(found: Fleet) -> list[str]:
    """The backend of each of many sessions."""
    chosen = [found.choose(None, Wanted(session=f"s{number}")) for number in range(1000)]
    assert None not in chosen
    return [backend.url for backend, _ in chosen]


def test_sessions_have_the_same_backend_in_each_router():
    found = homes(fleet(URLS))
    assert homes(fleet(URLS[::-1])) == found
    counts = Counter(found)
    assert len(counts) == 4 and min(counts.values()) > 180
    # A router alone chooses by load.
    alone = [fleet(URLS, has_peers=False), fleet(URLS, has_peers=False)]
    assert homes(alone[0]) != homes(alone[1])


def test_a_session_moves_only_where_its_backend_is_left_out():
    found = fleet(URLS)
    before = homes(found)
    found.set_state(found.backends[URLS[2]], "draining")
    for then, now in zip(before, homes(found), strict=True):
        assert now == then if then != URLS[2] else now != then


def test_a_busy_backend_gets_no_new_session():
    found = fleet(URLS)
    before = homes(found)
    found.backends[URLS[0]].load = 100
    for then, now in zip(before, homes(found), strict=True):
        assert now == then if then != URLS[0] else now != then


def test_a_known_session_and_a_prefix_come_first():
    found = fleet(URLS)
    home = found.choose(None, Wanted(session="s"))
    assert home is not None
    others = [backend for backend in found.backends.values() if backend is not home[0]]
    found.policy.index.add(others[0].number, [1, 2, 3])
    chosen = found.choose(None, Wanted([1, 2, 3, 4], "s"))
    assert chosen is not None and chosen[0] is others[0] and chosen[1].reason == "prefix"
    found.begin(others[1], Wanted(session="s"), home[1])
    chosen = found.choose(None, Wanted([1, 2, 3, 4], "s"))
    assert chosen is not None and chosen[0] is others[1] and chosen[1].reason == "session"


def test_bounds_are_divided():
    options = RouterOptions(max_backend_requests=9, max_queued_requests=10)
    shared = options.shared_by(4)
    assert (shared.max_backend_requests, shared.max_queued_requests) == (2, 2)
    assert options.shared_by(1) is options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"admin_key": "k"}, "admin_key: .* one of 4"),
        ({"max_backend_requests": 3}, "max_backend_requests must be at least 4"),
        ({"max_queued_requests": 3}, "max_queued_requests must be at least 4"),
    ],
)
def test_what_one_of_several_cannot_do_is_refused(options, message):
    RouterOptions(**options).shared_by(1)
    with pytest.raises(ConfigError, match=message):
        RouterOptions(**options).shared_by(4)


@pytest.mark.parametrize("limit", ["requests_per_minute", "tokens_per_minute"])
async def test_limits_that_several_routers_would_have_to_count_are_refused(tmp_path, limit):
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys: [{{name: a, key: b, {limit}: 5}}]")
    options = RouterOptions(api_keys_file=str(path))
    with pytest.raises(ConfigError, match=f"'a' has {limit}"):
        async with Routing(options, "first"):
            pass
    if limit == "requests_per_minute":
        async with Routing(options):
            pass


async def test_figures_have_the_routers_name(make_stub):
    stub = make_stub()
    await stub.start()
    try:
        async with Routing(RouterOptions(), "first") as routing:
            await routing.announce(stub.url)
            lines = [
                line for line in routing.metrics.text().decode().splitlines() if line[0] != "#"
            ]
            assert len(lines) > 9 and all('router="first"' in line for line in lines)
            assert any(re.match(r'.*_ready{.*backend="http.* 1.0', line) for line in lines)
        async with Routing(RouterOptions()) as routing:
            assert b"router=" not in routing.metrics.text()
    finally:
        await stub.stop()


async def test_a_request_waits_for_a_backend_to_announce_itself(make_stub):
    """One of several routers may hear of a backend later than clients hear of the router."""
    stub = make_stub()
    await stub.start()
    try:
        async with Routing(RouterOptions(queue_timeout=60)) as routing:
            transport = httpx.ASGITransport(routing.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
                body = {"prompt": "p", "model": "m"}
                asking = asyncio.create_task(client.post("/v1/completions", json=body))
                while not len(routing.proxy.queues):
                    await asyncio.sleep(0)
                await routing.announce(stub.url)
                assert (await asking).status_code == 200
    finally:
        await stub.stop()


async def test_a_backend_that_an_operator_drains_announces_itself_in_vain(make_stub):
    stub = make_stub()
    await stub.start()
    try:
        async with Routing(RouterOptions()) as routing:
            await routing.announce(stub.url)
            backend = routing.fleet.backends[stub.url]
            routing.fleet.set_state(backend, "draining", "an operator drains it")
            await routing.announce(stub.url)
            assert backend.state == "draining"
    finally:
        await stub.stop()


def test_engines_publish_for_a_router():
    engine, server = publishing({"model": "tiny"}, {"ui": False})
    assert engine == {
        "model": "tiny",
        "plugin_option": {
            "kv_events": {
                "enabled": True,
                "endpoint": "tcp://*:0",
                "replay_endpoint": "tcp://*:0",
            }
        },
    }
    assert server == {"ui": False, "admin_routes": True}
    # Other options stay, a command line's words among them.
    words = ["kv_events.endpoint=tcp://127.0.0.1:0", "kv_events.hwm=5", "lora.max_rank=2"]
    engine, _ = publishing({"model": "tiny", "plugin_option": words}, {"admin_routes": True})
    assert engine["plugin_option"]["kv_events"]["endpoint"] == "tcp://127.0.0.1:0"
    assert engine["plugin_option"]["kv_events"]["hwm"] == "5"
    assert engine["plugin_option"]["lora"] == {"max_rank": "2"}


@pytest.mark.parametrize(
    ("engine", "server", "message"),
    [
        ({"plugin_option": {"kv_events": {"enabled": False}}}, {}, "kv_events.enabled is false"),
        ({"plugin_option": {"kv_events": {"hwm": 0}}}, {}, "hwm"),
        ({}, {"admin_routes": False}, "server.admin_routes is false"),
        ({"disable_plugins": ["kv_events"]}, {}, "kv_events"),
    ],
)
def test_engines_that_may_not_publish_are_refused(engine, server, message):
    with pytest.raises(ConfigError, match=message):
        publishing({"model": "tiny", **engine}, server)
