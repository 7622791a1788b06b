"""The answer to a client: bytes of a backend's, passed on as they come."""

from __future__ import annotations

import aiohttp
import msgspec
from starlette.types import Receive, Scope, Send
from toolkit_lm_server.errors import ApiError

from toolkit_lm_router.resuming import DiedError, DivergedError, Stream
from toolkit_lm_router.upstream import answer_headers

_WHOLE = 4 * 2**20
"""Most bytes of an answer that is read whole before it is passed on, so that it can be asked for
again."""
_EVENT = 16 * 2**20
"""Most bytes of an event."""
_NAMED = ("/v1/messages", "/v1/responses")
"""Paths whose streams name their events."""

_encode = msgspec.json.Encoder().encode


class BrokenError(Exception):
    """A backend has failed, or its answer has broken off."""

    def __init__(
        self, reason: str, *, is_gone: bool = False, was_sent: bool = True, is_final: bool = False
    ) -> None:
        """`is_gone`: it cannot be reached. `was_sent`: it may have begun with the request.
        `is_final`: no other backend can go on."""
        super().__init__(reason)
        self.reason = reason
        self.is_gone = is_gone
        self.was_sent = was_sent
        self.is_final = is_final


class Answering:
    """The answer to one request."""

    def __init__(self, send: Send, path: str, request_id: str) -> None:
        self._send = send
        self._path = path
        self._request_id = request_id
        self.has_begun = False
        """The client has got a part of it."""
        self._separators: tuple[bytes, ...] = ()
        """The ends of an event; empty: the answer is one body."""

    async def pass_on(self, answer: aiohttp.ClientResponse, stream: Stream | None) -> None:
        """Passes an answer on. Raises BrokenError where it breaks off."""
        kind = answer.headers.get("Content-Type", "")
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            kind = ""
        if kind.startswith("text/event-stream"):
            self._separators = (b"\n\n", b"\r\n\r\n")
        elif kind.startswith("application/x-ndjson"):
            self._separators = (b"\n",)
        else:
            self._separators = ()
        try:
            if self.has_begun and (answer.status != 200 or not self._separators):
                reason = f"another backend has answered with the status {answer.status}"
                raise BrokenError(reason)
            if self._separators:
                await self._pass_events(answer, stream)
            else:
                await self._pass_bytes(answer)
        except (aiohttp.ClientError, TimeoutError) as error:
            # ClientError may be an OSError of the backend's. Those of the client are not.
            raise BrokenError(str(error) or type(error).__name__) from error
        except DiedError as error:
            raise BrokenError("its engine has died") from error
        except DivergedError as error:
            raise BrokenError(
                "another backend would give another answer, which the stream cannot go on with",
                is_final=True,
            ) from error

    async def _pass_bytes(self, answer: aiohttp.ClientResponse) -> None:
        length = answer.content_length
        if length is not None and length <= _WHOLE:
            body = await answer.read()
            await self._begin(answer, len(body))
            await self._body(body, more=False)
            return
        async for part in answer.content.iter_any():
            await self._begin(answer, length)
            await self._body(part)
        await self._begin(answer, length)
        await self._body(b"", more=False)

    async def _pass_events(self, answer: aiohttp.ClientResponse, stream: Stream | None) -> None:
        """Passes on whole events only, so that another backend, or an error, can follow them."""
        if answer.status != 200:
            stream = None
        held = last = b""
        async for part in answer.content.iter_any():
            held += part
            end = max(_end(held, mark) for mark in self._separators)
            if len(held) - end > _EVENT:
                raise BrokenError("an event is too large", is_final=True)
            if not end:
                continue
            whole = held[:end]
            held = held[end:]
            await self._begin(answer, None)
            made, error = (whole, None) if stream is None else _passed(stream, whole)
            if answer.content.at_eof() and (stream is None or stream.is_done) and error is None:
                # The answer's end goes along with it.
                last = made
            elif made:
                await self._body(made)
            if error is not None:
                raise error
        if stream is not None and not stream.is_done:
            raise BrokenError("the stream ended without its last event")
        await self._begin(answer, None)
        await self._body(last + held, more=False)

    async def _begin(self, answer: aiohttp.ClientResponse, length: int | None) -> None:
        if self.has_begun:
            return
        headers = answer_headers(answer, self._request_id)
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        start = {"type": "http.response.start", "status": answer.status, "headers": headers}
        self.has_begun = True
        await self._send(start)

    async def _body(self, part: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": part, "more_body": more})

    async def fail(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        """Tells of an error: as the answer, or as the end of a stream that has begun."""
        if not self.has_begun:
            response = error.response()
            response.headers["x-request-id"] = self._request_id
            await response(scope, receive, self._send)
            return
        if not self._separators:
            # A body whose length is told, and not reached: the server closes the connection.
            return
        await self._body(self._last_event(error))
        await self._body(b"", more=False)

    def _last_event(self, error: ApiError) -> bytes:
        body = error.body
        if self._separators == (b"\n",):
            return b"%b\n" % _encode({"error": body["error"]["message"]})
        if self._path in _NAMED:
            named = {"type": "error", **body}
            return b"event: error\ndata: %b\n\n" % _encode(named)
        return b"data: %b\n\ndata: [DONE]\n\n" % _encode(body)


def _passed(stream: Stream, whole: bytes) -> tuple[bytes, Exception | None]:
    """The bytes that the client gets of some events, and the error that comes after them."""
    events: list[bytes] = []
    try:
        for event in stream.pass_on(whole):
            events.append(event)  # noqa: PERF402 # it may raise after some
    except (DiedError, DivergedError) as error:
        return b"".join(events), error
    return b"".join(events), None


def _end(held: bytes, mark: bytes) -> int:
    """Position at which the last whole event ends; 0: there is none."""
    found = held.rfind(mark)
    return 0 if found < 0 else found + len(mark)
