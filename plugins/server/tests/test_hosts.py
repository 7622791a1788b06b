"""The check of the Host header."""

from __future__ import annotations

import socket

import httpx
import pytest
from toolkit_lm_server.app import create_app
from toolkit_lm_server.hosts import HostCheck, host_names
from toolkit_lm_server.listening import bind
from toolkit_lm_server.options import ServerOptions

pytestmark = pytest.mark.anyio
OWN = ["localhost", "127.0.0.1", "[::1]", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000"]
OTHER = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example:80",
    "[::2]:8000",
    "",
    "192.168.0.1",
]


async def statuses(engine, options, address, hosts) -> set[int]:
    with bind(address, 0) as listener:
        app = HostCheck(create_app(engine, options), host_names(options, listener))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        return {(await client.get("/health", headers={"host": host})).status_code for host in hosts}


async def test_a_page_of_another_host_cannot_ask_a_server_on_loopback(engine):
    """DNS rebinding: the page's own name leads to our address."""
    for address in ("127.0.0.1", "localhost", "127.0.0.2"):
        assert await statuses(engine, ServerOptions(host=address), address, [*OWN, address]) == {
            200
        }
        assert await statuses(engine, ServerOptions(host=address), address, OTHER) == {403}


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
async def test_on_loopback_of_ipv6(engine):
    assert await statuses(engine, ServerOptions(host="::1"), "::1", OWN) == {200}
    assert await statuses(engine, ServerOptions(host="::1"), "::1", OTHER) == {403}


async def test_hosts_that_are_allowed(engine):
    options = ServerOptions(allowed_hosts=["LLM.example"])
    assert await statuses(
        engine, options, "127.0.0.1", [*OWN, "llm.example", "llm.example:443"]
    ) == {200}
    assert await statuses(engine, options, "127.0.0.1", OTHER) == {403}
    assert await statuses(
        engine, ServerOptions(allowed_hosts=["x"], host="0.0.0.0"), "0.0.0.0", OTHER
    ) == {403}


async def test_no_check_with_a_key_or_beyond_loopback(engine):
    assert await statuses(engine, ServerOptions(api_key="secret"), "127.0.0.1", OTHER) == {200}
    assert await statuses(engine, ServerOptions(host="0.0.0.0"), "0.0.0.0", OTHER) == {200}


async def test_the_error_says_what_to_do(engine):
    with bind("127.0.0.1", 0) as listener:
        app = HostCheck(create_app(engine), host_names(ServerOptions(), listener))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://evil.example"
    ) as client:
        error = (await client.post("/v1/completions", json={"prompt": "a"})).json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "host_not_allowed")
        assert "'evil.example'" in error["message"] and "allowed_hosts" in error["message"]
    assert engine.asked == []


async def test_slashes_at_the_end_are_no_redirects(client):
    """They would lead to whatever the Host header names."""
    for path in ("/v1/models/fake/", "/health/", "/v1/completions/"):
        reply = await client.request(
            "POST" if "completions" in path else "GET", path, headers={"host": "evil.example"}
        )
        assert reply.status_code in (200, 400, 404) and "location" not in reply.headers
