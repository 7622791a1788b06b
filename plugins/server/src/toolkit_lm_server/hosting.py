"""A server in the event loop of a host program."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Any

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import EngineDeadError
from toolkit_lm.plugin import Plugins

from toolkit_lm_server.cli import engine_parts
from toolkit_lm_server.lifecycle import Lifecycle
from toolkit_lm_server.listening import listen, tls_context, url_of
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.threads import close, in_thread


class HostedServer:
    """An engine and its server, as those of `toolkit serve`. Signals are the host's. Use it as a
    context: at its end, requests under way get their time to finish, and the engine is closed."""

    def __init__(
        self, config: VllmConfig, options: ServerOptions, plugins: Plugins | None = None
    ) -> None:
        """`plugins`: loaded ones, in place of those of `config`. Raises ConfigError."""
        self._options = options
        self._parts = engine_parts(config, options, plugins or Plugins.load(config.plugins))
        self.metrics = self._parts.metrics
        self.url = ""
        """Where the server listens, once the context is entered."""
        self._ending = AsyncExitStack()

    async def __aenter__(self) -> HostedServer:
        """Waits until the engine is ready. Raises the ToolkitError that keeps it from starting."""
        parts = self._parts
        context = tls_context(self._options)
        async with AsyncExitStack() as ending:
            listener = ending.enter_context(listen(self._options))
            making = in_thread(parts.make)
            ending.push_async_callback(_closed, making)
            lifecycle = Lifecycle(
                making,
                parts.make_app,
                self._options,
                self.metrics,
                listener,
                parts.threads,
                parts.make_page(),
                context=context,
            )
            ending.callback(lifecycle.stop)
            self._serving = await lifecycle.start()
            self.url = url_of(listener, secure=context is not None)
            self._ending.push_async_callback(self._ended, lifecycle, ending.pop_all())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Raises EngineDeadError where the engine has died by itself."""
        await self._ending.aclose()

    def check(self) -> None:
        """Raises EngineDeadError where the server does not serve any more."""
        if self._serving.done():
            self._serving.result()
            raise EngineDeadError("the engine's server has ended")

    async def _ended(self, lifecycle: Lifecycle, ending: AsyncExitStack) -> None:
        async with ending:
            lifecycle.stop()
            await self._serving


async def _closed(making: Future[Any]) -> None:
    await asyncio.wrap_future(close(making))
