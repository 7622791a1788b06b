"""`toolkit serve`."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from concurrent.futures import wait

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError
from toolkit_lm.plugin import Plugins
from toolkit_lm_cli import engine_command

from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.plugin_routes import check_names
from toolkit_lm_server.standard_streams import logging_in_threads, open_closed_streams
from toolkit_lm_server.threads import CLOSING, close, in_thread


@engine_command(ServerOptions)
def serve(config: VllmConfig, options: ServerOptions, plugins: Plugins) -> None:
    """Serve a model over HTTP, with OpenAI's API."""
    open_closed_streams()
    if config.scheduler.scheduling_policy is None:
        config = config.replace(scheduling_policy="fair")
    metrics = Metrics()
    plugins.add_listener(metrics.name, metrics.toolkit_event)
    # What can fail at once does so before the engine starts.
    check_names(plugins, options.routes)
    with bind(options.host, options.port) as listener:
        from toolkit_lm.frontend import AsyncLLM

        # Until the lifecycle handles it: a KeyboardInterrupt in the middle of an import can keep a lock that the thread's imports need.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # Plugins and files may keep it for long, while the server answers already.
        making = in_thread(lambda: AsyncLLM(config, plugins=plugins, wait=False))
        try:
            from toolkit_lm_server.lifecycle import Lifecycle

            lifecycle = Lifecycle(making, options, metrics, listener)
            with logging_in_threads("uvicorn", "uvicorn.access"):
                asyncio.run(lifecycle.run())
        finally:
            wait([close(making)], CLOSING)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on the address. Raises ConfigError when it cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # asyncio turns Nagle's algorithm off for sockets that name their protocol, and for no others.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise ConfigError(f"option 'host': {host!r} is not an address to listen on: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Two servers can bind the same address; only one can listen on it.
        listener.listen()
        return listener
    except OSError as error:
        listener.close()
        in_use = error.errno == errno.EADDRINUSE
        hint = " Is another server running there? --port 0 takes a free port." if in_use else ""
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}.{hint}") from error
