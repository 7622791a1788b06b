"""Server-sent events, and lines of JSON."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import Response
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from toolkit_lm_server.caller import CALLER
from toolkit_lm_server.errors import ApiError, as_api_error
from toolkit_lm_server.request_log import REASON
from toolkit_lm_server.route import unless_disconnected


class Source(Protocol):
    """The source that events are made from."""

    async def aclose(self) -> None: ...


SourceT = TypeVar("SourceT", bound=Source)
Events = AsyncGenerator[list[dict[str, Any]], None]

_LONG = 5_000
"""Characters or items that the event loop itself encodes at once."""

_encode = msgspec.json.Encoder().encode


class ToldError(Exception):
    """An error that a stream's event has told the client already. The log still needs it."""


class EventStream(Response):
    """Sends objects as they come, then "[DONE]". `source` makes the events, and is closed when the
    client goes away.

    Objects that come together are sent together. An error after the start of the stream is an event
    of its own, in the shape of an error body.
    """

    media_type = "text/event-stream"
    end = b"data: [DONE]\n\n"
    """The bytes after the last object."""
    comment = b": keep-alive\n\n"
    """The bytes sent while nothing comes. Clients skip them."""

    def __init__(self, events: Events, source: Source) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._seconds = CALLER.get().keep_alive
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
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        end = self.end
        try:
            async with _beating(send, self.comment, self._seconds) as send_counted:
                async for events in self._events:
                    if events:
                        await send_counted(
                            {
                                "type": "http.response.body",
                                "body": await self._framed(events),
                                "more_body": True,
                            }
                        )
        except OSError:
            raise
        except ToldError as error:
            scope[REASON] = str(error)
        except Exception as error:
            api_error = as_api_error(error)
            scope[REASON] = str(api_error)
            end = self.frame(self.failure(api_error)) + self.end
        await send({"type": "http.response.body", "body": end, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _framed(self, events: list[dict[str, Any]]) -> bytes:
        """The bytes of objects. Those that repeat a large body's prompt are made in a thread."""
        if CALLER.get().is_large and any(map(_is_long, events)):
            return await asyncio.to_thread(lambda: b"".join(map(self.frame, events)))
        return b"".join(map(self.frame, events))

    @staticmethod
    def frame(event: dict[str, Any]) -> bytes:
        """The bytes of an object in the stream."""
        return b"data: %b\n\n" % _encode(event)

    @staticmethod
    def failure(error: ApiError) -> dict[str, Any]:
        """The last object of a stream that fails and has not told of it by itself."""
        return error.body


def _is_long(event: dict[str, Any]) -> bool:
    """Whether an object has a long text or list, itself or in a choice."""
    return any(
        isinstance(value, str | list) and len(value) > _LONG
        for part in (event, *event.get("choices", ()))
        for value in part.values()
    )


@asynccontextmanager
async def _beating(send: Send, comment: bytes, seconds: float | None) -> AsyncIterator[Send]:
    """A `send` beside which the comment is sent whenever nothing was sent for `seconds`."""
    if not comment or seconds is None:
        yield send
        return
    last = time.monotonic()

    async def counted(message: Message) -> None:
        nonlocal last
        await send(message)
        last = time.monotonic()

    async def beat() -> None:
        while True:
            if (left := last + seconds - time.monotonic()) > 0:
                await asyncio.sleep(left)
            else:
                await counted({"type": "http.response.body", "body": comment, "more_body": True})

    beats = asyncio.create_task(beat())
    try:
        yield counted
    finally:
        beats.cancel()
        await asyncio.gather(beats, return_exceptions=True)


async def stream_of(
    begin: Coroutine[Any, Any, SourceT],
    events: Callable[[SourceT], Events],
    kind: type[EventStream] = EventStream,
) -> EventStream:
    """The stream of the source that `begin` gives. Where `begin` takes long, the stream starts with
    comments. Later errors are events."""
    late = _Late(asyncio.ensure_future(begin), events)
    try:
        await asyncio.wait([late.task], timeout=CALLER.get().keep_alive if kind.comment else None)
    except asyncio.CancelledError:
        await late.aclose()
        raise
    if not late.task.done():
        return kind(late.events(), late)
    source = late.task.result()
    return kind(events(source), source)


async def telling(events: Events, failure: Callable[[ApiError], dict[str, Any]]) -> Events:
    """The events. Where they fail, the last event tells of the failure, and ToldError is raised."""
    try:
        async with aclosing(events):
            async for some in events:
                yield some
    except Exception as error:
        api_error = as_api_error(error)
        yield [failure(api_error)]
        raise ToldError(str(api_error)) from error


class _Late:
    """A source that is still being made."""

    def __init__(self, task: asyncio.Future[Any], make: Callable[[Any], Events]) -> None:
        self.task = task
        self._make = make

    async def events(self) -> Events:
        async with aclosing(self._make(await self.task)) as events:
            async for some in events:
                yield some

    async def aclose(self) -> None:
        self.task.cancel()
        found = await asyncio.gather(self.task, return_exceptions=True)
        if not isinstance(found[0], BaseException):
            await found[0].aclose()


class NamedEvents(EventStream):
    """Events that are named by the field `type` of their objects. The last one marks the end
    itself."""

    end = b""

    @staticmethod
    def frame(event: dict[str, Any]) -> bytes:
        return b"event: %b\ndata: %b\n\n" % (event.get("type", "error").encode(), _encode(event))


class JsonLines(EventStream):
    """Objects, one a line. The last one marks the end itself."""

    media_type = "application/x-ndjson"
    end = b""
    comment = b""

    @staticmethod
    def frame(event: dict[str, Any]) -> bytes:
        return b"%b\n" % _encode(event)
