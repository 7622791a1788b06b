"""The gate for requests that come while the engine starts: they wait for it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.keys import Keys
from toolkit_lm_server.route import authorization


class StartGate:
    """Holds requests until the engine is ready, and then hands them to whichever app serves it."""

    def __init__(self, early: FastAPI, keys: Keys | None, start_timeout: float) -> None:
        """`early`: the app that answers until then. Requests that it has routes for are not held.
        `keys`: clients need one of them. `start_timeout`: seconds that a request waits."""
        self.app: ASGIApp = early
        self._early = early.state.early
        self._keys = keys
        self._seconds = start_timeout
        self._opened = asyncio.Event()

    def open(self) -> None:
        """Lets all requests through: the engine is ready, or has failed."""
        self._opened.set()

    async def wait(self) -> None:
        """Returns when it is open."""
        await self._opened.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._opened.is_set() and self._waits(scope):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._opened.wait(), self._seconds)
        await self.app(scope, receive, send)

    def _waits(self, scope: Scope) -> bool:
        """Whether a request waits for the engine. A request without a valid key is answered at
        once."""
        if scope["type"] != "http" or any(
            route.matches(scope)[0] is not Match.NONE for route in self._early
        ):
            return False
        try:
            return self._keys is None or bool(self._keys.find(authorization(Headers(scope=scope))))
        except ApiError:
            return False
