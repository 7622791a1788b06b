"""The command `toolkit route`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import time

from toolkit_lm.errors import ConfigError
from toolkit_lm_commands import engine_command
from toolkit_lm_server.garbage import Garbage
from toolkit_lm_server.hosts import HostCheck, host_names
from toolkit_lm_server.lifecycle import InFlight, logged
from toolkit_lm_server.limits.connections import HttpServer
from toolkit_lm_server.listening import listen, tls_context, url_of
from toolkit_lm_server.log import ACCESS, announce, configure
from toolkit_lm_server.reloading import Reloading
from toolkit_lm_server.standard_streams import logging_in_threads, open_closed_streams
from toolkit_lm_server.supervisor import Supervisor
from toolkit_lm_server.title import set_title

from toolkit_lm_router.options import RouterOptions
from toolkit_lm_router.routing import Routing

_POLL = 0.05
"""Seconds from one look at the router's state to the next."""

logger = logging.getLogger("uvicorn.error")


@engine_command(RouterOptions)
def route(options: RouterOptions) -> None:
    """Route requests to several servers that speak OpenAI's API.

    A request goes to a backend that has had the beginning of its prompt, unless that backend is
    much busier than others, and otherwise to the less loaded of two random ones. Requests of one
    session (the field prompt_cache_key or user, or the header X-Session-ID) stay together. Backends
    that fail are left out until they are healthy. A request whose answer has not begun is sent to
    another one. The stream of a chat or completion whose backend dies goes on on another one, if
    both are servers of toolkit-lm.
    """
    if not options.backend and options.admin_key is None:
        raise ConfigError(
            "backend: name at least one server, such as 'http://127.0.0.1:8000', or set admin_key "
            "and add backends later."
        )
    open_closed_streams()
    server = options.server
    configure(server)
    context = tls_context(server)
    with listen(server) as listener:
        set_title("toolkit-lm route")
        with logging_in_threads("", ACCESS):
            asyncio.run(Running(options, listener, context).run())


class Running:
    """A router from its first connection to its end."""

    def __init__(
        self,
        options: RouterOptions,
        listener: socket.socket,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._options = options
        self._listener = listener
        self._context = context
        self._is_stopped = False
        self._garbage: Garbage | None = None
        """The collector of the process, where that is the router's own."""
        self._routing = Routing(options)
        self.fleet = self._routing.fleet

    async def run(self) -> None:
        """Serves until a signal comes. The second one ends the process at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled, number)
        self._garbage = Garbage()
        await self.serve()

    async def serve(self) -> None:
        """Serves until `stop`. Requests under way get their time."""
        options = self._options
        server = options.server
        async with self._routing as routing:
            in_flight = InFlight(routing.app)
            checked = HostCheck(in_flight, host_names(server, self._listener))
            http = HttpServer(logged(checked, routing.metrics, server), server, self._context)
            reloading = Reloading(server, routing.proxy.keys, http.bounded, Supervisor())
            serving = asyncio.create_task(http.serve(sockets=[self._listener]))
            try:
                url = url_of(self._listener, secure=self._context is not None)
                announce(f"Routing to {len(self.fleet.backends)} backends at {url}", server)
                while not self._is_stopped and not serving.done():
                    await reloading.tend("")
                    if self._garbage is not None:
                        self._garbage.tend(is_idle=not in_flight.count)
                    await asyncio.sleep(_POLL)
                routing.proxy.is_draining = True
                deadline = time.monotonic() + options.shutdown_timeout
                while (in_flight.count or http.bounded.num_unread) and (
                    time.monotonic() < deadline
                ):
                    await asyncio.sleep(_POLL)
                http.bounded.abort()
            finally:
                http.should_exit = True
                await serving

    def stop(self) -> None:
        """Refuses new requests, and ends when those under way have ended."""
        self._is_stopped = True

    def _signalled(self, number: int) -> None:
        if self._is_stopped:
            os._exit(128 + number)
        self.stop()
