"""`toolkit serve`."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI
from llm_toolkit.cli import engine_command
from llm_toolkit.config import VllmConfig
from llm_toolkit.errors import ConfigError, EngineDeadError
from llm_toolkit.plugin import Plugins

from llm_toolkit_server.app import create_app
from llm_toolkit_server.metrics import Metrics
from llm_toolkit_server.options import ServerOptions
from llm_toolkit_server.plugin_routes import check_names

if TYPE_CHECKING:
    from llm_toolkit.engine import AsyncLLM

_POLL = 0.1
"""Seconds between two looks at the engine's health."""
_CLOSING = 5
"""Seconds that the last answers and the engine's last step get."""


@engine_command(ServerOptions)
def serve(config: VllmConfig, options: ServerOptions) -> None:
    """Serve a model over HTTP, with OpenAI's API."""
    metrics = Metrics()
    plugins = Plugins.load(config.plugins, [metrics])
    # What can fail at once does so before torch is imported and the model is loaded.
    check_names(plugins, options.routes)
    with bind(options.host, options.port) as listener:
        from llm_toolkit.engine import AsyncLLM

        engine = AsyncLLM(config, plugins=plugins)
        try:
            server = uvicorn.Server(_settings(create_app(engine, options, metrics=metrics), options))
            with _stopped_by_signals(server):
                asyncio.run(_run(server, listener, engine, options.shutdown_timeout))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # Another process has begun to listen on the address while the model was loaded.
            raise ConfigError(f"cannot listen on {options.host} port {options.port}: {error.strerror or error}.") from error
        finally:
            _close(engine).join(_CLOSING)
        if engine.error is not None:
            raise EngineDeadError(f"the engine has died: {type(engine.error).__name__}: {engine.error}") from engine.error


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address and does not listen yet. Raises ConfigError when it cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"option 'host': {host!r} is no address to listen on: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        return listener
    except OSError as error:
        listener.close()
        in_use = error.errno == errno.EADDRINUSE
        hint = " Is another server running there? --port 0 takes a free port." if in_use else ""
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}.{hint}") from error


def _settings(app: FastAPI, options: ServerOptions) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="off",
        log_level=options.log_level,
        access_log=options.access_log,
        root_path=options.root_path,
        timeout_graceful_shutdown=options.shutdown_timeout + _CLOSING,
    )


async def _run(server: uvicorn.Server, listener: socket.socket, engine: AsyncLLM, shutdown_timeout: int) -> None:
    """Serves until a signal stops the server or the engine dies."""
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    announced = False
    while not (serving.done() or server.should_exit):
        if server.started and not announced:
            announced = True
            print(f"Serving {engine.config.served_model_name} at {_url(listener)}", flush=True)
        if engine.error is not None:
            server.should_exit = True
        await asyncio.wait([serving], timeout=_POLL)
    await asyncio.wait([serving], timeout=shutdown_timeout)
    if not serving.done():
        # What is still under way is told that the engine has been shut down, and so comes to its end.
        _close(engine)
    await serving


def _url(listener: socket.socket) -> str:
    host, port, *_ = listener.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def _stopped_by_signals(server: uvicorn.Server) -> Iterator[None]:
    # uvicorn raises the signals that stopped it once more at its end, for whoever handled them before: here, for a clean exit.
    def stop(signum: int, frame: Any) -> None:
        server.should_exit = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _close(engine: AsyncLLM) -> threading.Thread:
    """Closes the engine. The thread is a daemon: a step that hangs cannot keep the process alive."""
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    return closing
