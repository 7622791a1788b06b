"""Connections of a real HTTP server in this process, over a fake engine: their options, bounds and ends."""

from __future__ import annotations

import asyncio
import socket

import pytest
from toolkit_lm_server.cli import bind

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_answers_do_not_wait_for_acknowledgements(host):
    """Nagle's algorithm and delayed acknowledgements would hold the second part of an answer back for 40 ms."""
    accepted = asyncio.get_running_loop().create_future()
    listener = bind(host, 0)
    async with await asyncio.start_server(lambda reader, writer: accepted.set_result(writer), sock=listener):
        _, client = await asyncio.open_connection(*listener.getsockname()[:2])
        writer = await accepted
        assert writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        writer.close()
        client.close()
