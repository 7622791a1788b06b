"""The health of the server: /live, /health and /ready."""

from __future__ import annotations

from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse

from toolkit_lm_server.errors import RETRY_AFTER, ApiError
from toolkit_lm_server.watched import Watched, engine_states

ALIVE = ("starting", "ready", "restarting")
"""States of an engine that lives, or comes to life by itself. A supervisor has no reason to end the
server."""
_TEMPORARY = ("starting", "restarting", "stalled")


class Readiness:
    """Answers /live, /health and /ready, and refuses requests that could not be served."""

    def __init__(self, engine: Watched) -> None:
        self.engine = engine
        self.leaving = False
        """/health says that the server is about to end. Requests are served yet."""
        self.draining = False
        """New requests are refused. The server ends when those under way have ended."""

    async def live(self) -> Response:
        """200 while the engine starts or makes progress; 503 with the reason when it has stalled or
        died."""
        health = self.engine.health()
        return JSONResponse(
            self._body(health.status, health.reason), 200 if health.status in ALIVE else 503
        )

    async def health(self) -> Response:
        """200 while requests are served, else 503 with the reason."""
        health = self.engine.health()
        is_ending = self.leaving or self.draining
        if health.status == "ready" and not is_ending:
            return JSONResponse(self._body("ready", ""))
        status = "draining" if is_ending else health.status
        return JSONResponse(
            self._body(status, health.reason), 503, {"Retry-After": str(RETRY_AFTER)}
        )

    def _body(self, status: str, reason: str) -> dict[str, Any]:
        body: dict[str, Any] = (
            {"status": status, "reason": reason} if reason else {"status": status}
        )
        if engines := engine_states(self.engine):
            body["engines"] = engines
        return body

    def refusal(self) -> ApiError:
        """The answer (503) to requests that are not served."""
        headers = {"Retry-After": str(RETRY_AFTER)}
        if self.draining:
            return ApiError(
                503,
                "The server is being stopped.",
                code="server_stopping",
                headers={**headers, "Connection": "close"},
            )
        health = self.engine.health()
        reason = f": {health.reason}" if health.reason else "."
        return ApiError(
            503,
            f"The engine is {health.status}{reason}",
            code=f"engine_{health.status}",
            headers=headers if health.status in _TEMPORARY else None,
        )
