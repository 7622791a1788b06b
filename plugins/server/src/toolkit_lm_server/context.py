"""What a request's headers say of it: its id, and the trace that it belongs to."""

from __future__ import annotations

import re
import uuid

from fastapi import Request

REQUEST_ID = "x-request-id"
_KEY = "toolkit_lm.request_id"
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TRACE = {"traceparent": 128, "tracestate": 4096}
"""W3C headers, and the most characters that are taken of each; a longer one is dropped."""


def request_id(request: Request) -> str:
    """The client's x-request-id where it is a plain word, else one of our own. It is for people: nothing is found by it."""
    if _KEY not in request.scope:
        given = request.headers.get(REQUEST_ID, "")
        request.scope[_KEY] = given if _ID.fullmatch(given) else uuid.uuid4().hex
    found: str = request.scope[_KEY]
    return found


def request_context(request: Request) -> dict[str, str]:
    """What plugins that watch the engine are told of an HTTP request."""
    route = getattr(request.scope.get("route"), "path", request.url.path)
    context = {"route": route, "request_id": request_id(request)}
    for name, most in _TRACE.items():
        value = request.headers.get(name, "")
        if 0 < len(value) <= most and value.isascii() and value.isprintable():
            context[name] = value
    return context
