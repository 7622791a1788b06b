"""Whether requests are served now: the engine's health, and whether the server is being stopped."""

from __future__ import annotations

from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse

from toolkit_lm_server.errors import RETRY_AFTER, ApiError
from toolkit_lm_server.metrics import Watched

_ALIVE = ("starting", "ready", "restarting")
"""What gets better by itself: whoever watches the server has no reason to end it."""
_TEMPORARY = ("starting", "restarting", "stalled")
NOT_NOW: dict[int | str, dict[str, Any]] = {503: {"description": "It is not so, with the status and its reason."}}
"""How the API's description has what else /health and /ready answer."""


class Readiness:
    """Answers /health and /ready, and refuses the requests that nobody would serve."""

    def __init__(self, engine: Watched) -> None:
        self.engine = engine
        self.draining = False
        """No new request is taken: the server ends when those under way have ended."""

    async def health(self) -> Response:
        """200 while the engine starts or makes progress; 503 with the reason when it has stalled or died."""
        health = self.engine.health()
        return JSONResponse(_body(health.status, health.reason), 200 if health.status in _ALIVE else 503)

    async def ready(self) -> Response:
        """200 while requests are served, else 503 with the reason."""
        health = self.engine.health()
        if health.status == "ready" and not self.draining:
            return JSONResponse(_body("ready", ""))
        status = "draining" if self.draining else health.status
        return JSONResponse(_body(status, health.reason), 503, {"Retry-After": str(RETRY_AFTER)})

    def check(self) -> None:
        """Raises ApiError (503) unless requests are served."""
        headers = {"Retry-After": str(RETRY_AFTER)}
        if self.draining:
            raise ApiError(503, "The server is being stopped.", code="server_stopping", headers={**headers, "Connection": "close"})
        health = self.engine.health()
        if health.status != "ready":
            reason = f": {health.reason}" if health.reason else "."
            temporary = health.status in _TEMPORARY
            raise ApiError(
                503, f"The engine is {health.status}{reason}", code=f"engine_{health.status}", headers=headers if temporary else None
            )


def _body(status: str, reason: str) -> dict[str, Any]:
    return {"status": status, "reason": reason} if reason else {"status": status}
