"""Targets that answer the rows: a server elsewhere, or the server's app around an engine in this
process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError, ToolkitError
from toolkit_lm.plugin import Plugins

from toolkit_lm_server.batch.rows import Answer, Row
from toolkit_lm_server.route import REQUEST_ID
from toolkit_lm_server.unknown_fields import IGNORED

_ATTEMPTS = 6
_LONGEST_PAUSE = 30.0
_BUSY = (429, 502, 503)
"""Statuses that say nothing of the row. It is asked again."""
_REFUSED = (401, 403)
"""Statuses that all rows would get."""
_OPENING = 10
"""Seconds in which a server must take a connection."""


class Target:
    """Asks for a row's answer, again where the server is busy or away."""

    def __init__(self, client: httpx.AsyncClient, name: str, first_pause: float = 1.0) -> None:
        self._client = client
        self._name = name
        self._first_pause = first_pause

    async def check(self) -> None:
        """Raises ToolkitError where the target cannot answer."""
        try:
            response = await self._client.get("/v1/models")
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ConfigError(
                f"option 'url': {self._name!r} is not the address of a server: {error}"
            ) from error
        except httpx.HTTPError as error:
            raise ToolkitError(
                f"no answer from {self._name}: {error or type(error).__name__}"
            ) from error
        self._check_allowed(response)

    async def ask(self, row: Row) -> Answer:
        """The answer to a row. Raises ToolkitError where asking for any row is of no use."""
        pause = self._first_pause
        why = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(min(pause, _LONGEST_PAUSE))
                pause *= 2
            try:
                response = await self._client.post(row.url, content=bytes(row.body))
            except httpx.HTTPError as error:
                why = str(error) or type(error).__name__
                continue
            self._check_allowed(response)
            if response.status_code not in _BUSY:
                request_id = response.headers.get(REQUEST_ID, "")
                ignored = response.headers.get(IGNORED, "")
                return Answer(response.status_code, request_id, response.content, ignored)
            why = f"{response.status_code}: {response.text[:300]}"
            after = response.headers.get("retry-after", "")
            if response.status_code == 503 and "engine_dead" in response.text:
                break
            pause = max(pause, float(after)) if after.isdecimal() and len(after) < 4 else pause
        raise ToolkitError(f"{self._name} does not answer: {why}")

    def _check_allowed(self, response: httpx.Response) -> None:
        if response.status_code in _REFUSED:
            raise ToolkitError(
                f"{self._name} refuses all requests ({response.status_code}): {response.text[:300]}"
            )


@asynccontextmanager
async def server(
    url: str, api_key: str | None, concurrency: int, timeout: float
) -> AsyncIterator[Target]:
    """A server that runs already. Raises ToolkitError where it is not there."""
    address = url.rstrip("/").removesuffix("/v1")
    headers = {"content-type": "application/json"} | (
        {"authorization": f"Bearer {api_key}"} if api_key else {}
    )
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    waiting = httpx.Timeout(timeout, connect=_OPENING, pool=None)
    try:
        client = httpx.AsyncClient(
            base_url=address, headers=headers, limits=limits, timeout=waiting
        )
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigError(
            f"option 'url': {address!r} is not the address of a server: {error}"
        ) from error
    async with client:
        target = Target(client, f"the server at {address}")
        await target.check()
        yield target


@asynccontextmanager
async def engine(config: VllmConfig, plugins: Plugins, max_body_size: str) -> AsyncIterator[Target]:
    """The server's app around an engine of its own, with the checks of a server. Raises the errors
    of the engine's start."""
    # They take long to import, and a server elsewhere needs none of them.
    from toolkit_lm import AsyncLLM

    from toolkit_lm_server.app import create_app
    from toolkit_lm_server.options import ServerOptions
    from toolkit_lm_server.threads import SharedThreads

    asyncio.get_running_loop().set_default_executor(SharedThreads())
    llm = AsyncLLM(config, plugins=plugins, wait=False)
    try:
        await llm.wait_ready()
        app = create_app(llm, ServerOptions(max_body_size=max_body_size, routes=[]))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        headers = {"content-type": "application/json"}
        # This transport knows no timeouts.
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", headers=headers
        ) as client:
            yield Target(client, "the engine")
    finally:
        llm.close()
