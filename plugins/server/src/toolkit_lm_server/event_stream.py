"""Server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from fastapi import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from toolkit_lm_server.errors import as_api_error
from toolkit_lm_server.route import unless_disconnected

_DONE = b"data: [DONE]\n\n"


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

    def __init__(self, events: AsyncGenerator[list[dict[str, Any]], None], source: Source) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._source), aclosing(self._events):
            try:
                await unless_disconnected(receive, self._send_all(send))
            except (ClientDisconnect, OSError):
                # Nobody is left to answer.
                return

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        end = _DONE
        try:
            async for events in self._events:
                if events:
                    await send({"type": "http.response.body", "body": _as_body(events), "more_body": True})
        except OSError:
            raise
        except Exception as error:
            end = _as_body([as_api_error(error).body]) + _DONE
        await send({"type": "http.response.body", "body": end, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _as_body(events: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(b"data: %b\n\n" % _encode(event) for event in events)
