"""Server-sent events, and lines of JSON."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from fastapi import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from toolkit_lm_server.errors import as_api_error
from toolkit_lm_server.request_log import REASON
from toolkit_lm_server.route import unless_disconnected


class Source(Protocol):
    """What events are made of."""

    async def aclose(self) -> None: ...


_encode = msgspec.json.Encoder().encode


class EventStream(Response):
    """Sends objects as they come, then "[DONE]". `source`, what they are made of, is closed when the client goes away.

    Objects that come together are sent together. An error after the start of the stream is an event of its own, in the shape of an error
    body.
    """

    media_type = "text/event-stream"
    end = b"data: [DONE]\n\n"
    """What follows the last object."""

    def __init__(self, events: AsyncGenerator[list[dict[str, Any]], None], source: Source) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._source), aclosing(self._events):
            try:
                await unless_disconnected(receive, self._send_all(scope, send))
            except (ClientDisconnect, OSError):
                # Nobody is left to answer.
                return

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        end = self.end
        try:
            async for events in self._events:
                if events:
                    await send({"type": "http.response.body", "body": b"".join(map(self.frame, events)), "more_body": True})
        except OSError:
            raise
        except Exception as error:
            told = as_api_error(error)
            scope[REASON] = str(told)
            end = self.frame(told.body) + self.end
        await send({"type": "http.response.body", "body": end, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @staticmethod
    def frame(event: dict[str, Any]) -> bytes:
        """An object, as it is sent."""
        return b"data: %b\n\n" % _encode(event)


class NamedEvents(EventStream):
    """Events that are named by the field `type` of their objects. The last one says itself that it is."""

    end = b""

    @staticmethod
    def frame(event: dict[str, Any]) -> bytes:
        return b"event: %b\ndata: %b\n\n" % (event.get("type", "error").encode(), _encode(event))


class JsonLines(EventStream):
    """Objects, one a line. The last one says itself that it is."""

    media_type = "application/x-ndjson"
    end = b""

    @staticmethod
    def frame(event: dict[str, Any]) -> bytes:
        return b"%b\n" % _encode(event)
