"""Server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from llm_toolkit_server.disconnect import unless_disconnected
from llm_toolkit_server.errors import as_api_error
from llm_toolkit_server.generation import Generation


class EventStream(Response):
    """Sends objects as they come, then "[DONE]". `generation`, their source, is closed when the client goes away.

    An error after the start of the stream is an event of its own, in the shape of an error body.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[dict[str, Any], None], generation: Generation) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._generation), aclosing(self._events):
            try:
                await unless_disconnected(receive, self._send_all(send))
            except (ClientDisconnect, OSError):
                # Nobody is left to answer.
                return

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await _send_event(send, json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":")))
        except OSError:
            raise
        except Exception as error:
            await _send_event(send, json.dumps(as_api_error(error).body))
        await _send_event(send, "[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_event(send: Send, data: str) -> None:
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
