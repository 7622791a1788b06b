"""The log's line for each request, and its figures: the request, the answer's status, the time, and
the error."""

from __future__ import annotations

import json
import logging
import time
from typing import Protocol
from urllib.parse import quote

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolkit_lm_server.caller import KEY, Caller
from toolkit_lm_server.errors import as_api_error
from toolkit_lm_server.log import ACCESS, fields

POLLS = ("/health", "/ready", "/live", "/ping", "/load", "/metrics")
"""Paths that are polled. Their requests have no line."""
REASON = "toolkit_lm.reason"
"""Key of the error in a request's scope, for an answer that had begun already."""
_LEFT = 499
"""The status of a request whose client left before an answer."""
_MOST_BODY = 2**14
"""Most bytes of an error's body that are read."""
_REASON = 200
_TARGET = 500
"""Most characters of a path that a line shows, as `_REASON` is of a reason. Both may be a
client's."""

_logger = logging.getLogger(ACCESS)


class _Answer:
    """Records an answer's status, and the body of an error, while it is sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        self.body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif self.status >= 400 and len(self.body) < _MOST_BODY:
            self.body += message.get("body", b"")[:_MOST_BODY]
        await self._send(message)


class AnswerCounter(Protocol):
    """Counts answers."""

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        """A request was answered."""


class RequestLog:
    """Logs each request when its app has answered. An exception of the app becomes an answer."""

    def __init__(self, app: ASGIApp, metrics: AnswerCounter, *, all_requests: bool = True) -> None:
        """`all_requests`: log all, and not only those that failed."""
        self._app = app
        self._metrics = metrics
        self._all = all_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # The lifespan.
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        answer = _Answer(send)
        try:
            await self._app(scope, receive, answer.send)
        except Exception as error:
            # A middleware's.
            if answer.status:
                raise
            await as_api_error(error).response()(scope, receive, answer.send)
        finally:
            self._end(scope, answer, time.perf_counter() - start)

    def _end(self, scope: Scope, answer: _Answer, seconds: float) -> None:
        status = answer.status or _LEFT
        self._metrics.answered(
            getattr(scope.get("route"), "path", "none"), scope["method"], status, seconds
        )
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        reason = scope.get(REASON) or (reason_of(answer.body) if status >= 400 else "")
        if path not in POLLS and (self._all or status >= 400 or reason):
            log_request(scope, status, seconds, reason)


def log_request(scope: Scope, status: int, seconds: float | None, reason: str = "") -> None:
    """Writes a request's line. `reason`: its error."""
    client = scope.get("client")
    caller: Caller | None = scope.get(KEY)
    address = f"{client[0]}:{client[1]}" if client else ""
    # Without the query, where some clients put keys.
    target = quote(scope["path"])
    log_answer(
        address,
        f"{scope['method']} {target[:_TARGET]} HTTP/{scope['http_version']}",
        status,
        reason,
        key=None if caller is None else caller.key,
        seconds=seconds,
        request_id=None if caller is None else caller.request_id,
    )


def log_answer(
    address: str,
    request: str,
    status: int,
    reason: str,
    *,
    key: str | None = None,
    seconds: float | None = None,
    request_id: str | None = None,
) -> None:
    """Writes the line of a request, or of bytes that were not one. `key`: the name of the client's
    key."""
    # In JSON, nothing of a client's ends a quotation or a line.
    reason = reason if len(reason) <= _REASON else f"{reason[:_REASON]}..."
    parts = [
        address or "-",
        "" if key is None else json.dumps(key),
        f'"{request}"',
        str(status),
        "" if seconds is None else f"{seconds:.3f} s",
        f"id={request_id}" if request_id else "",
        json.dumps(reason) if reason else "",
    ]
    shown = fields(
        client=address or None,
        key=key,
        request=request,
        status=status,
        seconds=None if seconds is None else round(seconds, 6),
        reason=reason or None,
        request_id=request_id,
    )
    _logger.log(
        logging.WARNING if status >= 500 else logging.INFO,
        "%s",
        " ".join(filter(None, parts)),
        extra=shown,
    )


def reason_of(body: bytes) -> str:
    """The message of an error's body in any vendor's form. "" where there is none."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    for _ in range(3):
        if isinstance(found, dict):
            found = next(
                (
                    found[name]
                    for name in ("error", "message", "detail", "reason")
                    if found.get(name)
                ),
                "",
            )
    return found if isinstance(found, str) else ""
