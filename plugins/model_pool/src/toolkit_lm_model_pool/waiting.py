"""Streams whose model is not loaded yet: comments tell meanwhile how far the load is."""

from __future__ import annotations

import asyncio
import importlib
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import Message, Send
from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.event_stream import EventStream
from toolkit_lm_server.request_log import REASON
from toolkit_lm_server.route import REQUEST_ID, caller_of

if TYPE_CHECKING:
    from toolkit_lm_model_pool.model import PooledModel

PERIOD = 1.0
"""Seconds from one comment to the next."""
_SERVER = "toolkit_lm_server.event_stream:EventStream"
STREAMS = {
    "/v1/chat/completions": _SERVER,
    "/v1/completions": _SERVER,
    "/infill": _SERVER,
    "/generate": _SERVER,
    "/v1/audio/transcriptions": _SERVER,
    "/v1/audio/translations": _SERVER,
    "/v1/responses": "toolkit_lm_server.responses.output:ResponseEvents",
    "/v1/messages": "toolkit_lm_vendor_apis.anthropic.output:MessageEvents",
    "/v2/chat": "toolkit_lm_vendor_apis.cohere.output:ChatEvents",
    "/completion": "toolkit_lm_vendor_apis.llama_cpp.output:LlamaEvents",
}
"""Classes of streams by path. Ollama's are not among them: lines of JSON have no comments."""


def stream_class(path: str) -> type[EventStream] | None:
    """The class of the streams of a path, without the server's prefix. None: it has none, or its
    plugin is not installed."""
    bare = path.rstrip("/")
    name = STREAMS.get(bare) or STREAMS.get(f"/v1{bare}")
    if name is None:
        return None
    module, _, attribute = name.partition(":")
    try:
        found: type[EventStream] = getattr(importlib.import_module(module), attribute)
    except ImportError:
        return None
    return found


class Answer:
    """Sends the answer of a model. A stream may begin before the model is loaded: an error that
    comes later is an event of it then."""

    def __init__(self, request: Request, send: Send) -> None:
        self._request = request
        self._send = send
        self._kind: type[EventStream] | None = None
        """Class of the stream that has begun early. None: none has."""
        self._status = 0
        self._body = b""
        """Body of an error that becomes an event."""
        self.is_begun = False
        """The model's own answer has begun."""

    @property
    def is_early(self) -> bool:
        """Whether a stream has begun before its model's answer."""
        return self._kind is not None

    async def __call__(self, message: Message) -> None:
        self.is_begun = True
        if self._kind is None:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._status < 400:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._fail(self._kind, _error_of(self._status, self._body))

    async def _fail(self, kind: type[EventStream], error: ApiError) -> None:
        self._request.scope[REASON] = str(error)
        event = kind.frame(kind.failure(error)) + kind.end
        await self._send({"type": "http.response.body", "body": event, "more_body": False})

    @asynccontextmanager
    async def comments(
        self, kind: type[EventStream] | None, model: PooledModel
    ) -> AsyncIterator[None]:
        """Sends a comment each second within the `with` block, in which the model is waited for.
        The first one begins the stream. `kind`: None for answers that have no comments."""
        if kind is None:
            yield
            return
        ended = asyncio.Event()
        task = asyncio.create_task(self._comment(kind, model, ended))
        try:
            yield
        finally:
            # A message that is being sent is sent whole.
            ended.set()
            await task

    async def _comment(
        self, kind: type[EventStream], model: PooledModel, ended: asyncio.Event
    ) -> None:
        # The client may be gone, which the one who waits notices.
        with suppress(OSError):
            while not await _within(ended, PERIOD):
                if self._kind is None:
                    self._kind = kind
                    await self._send(self._start(kind))
                text = f": {progress_text(model, time.monotonic())}\n\n"
                body = text.encode()
                await self._send({"type": "http.response.body", "body": body, "more_body": True})

    def _start(self, kind: type[EventStream]) -> Message:
        headers = {
            "content-type": f"{kind.media_type}; charset=utf-8",
            "cache-control": "no-cache",
            REQUEST_ID: caller_of(self._request).request_id,
        }
        return {"type": "http.response.start", "status": 200, "headers": Headers(headers).raw}


async def _within(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event is set within so many seconds."""
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True


def progress_text(model: PooledModel, now: float) -> str:
    """The state of a model that is waited for, in a comment's words."""
    progress = model.progress(now)
    if progress is None:
        return f"waiting for {model.name}"
    return f"loading {model.name} {progress}%"


def _error_of(status: int, body: bytes) -> ApiError:
    """The error that a body tells, in whichever API's shape."""
    message: object = "The server failed on this request."
    fields: dict[str, object] = {}
    with suppress(ValueError, AttributeError, KeyError):
        found = json.loads(body)
        error = found.get("error", found)
        fields = {} if isinstance(error, str) else error
        message = error if isinstance(error, str) else error["message"]
    param, code = (
        value if isinstance(value := fields.get(name), str) else None for name in ("param", "code")
    )
    return ApiError(status, str(message), param=param, code=code)
