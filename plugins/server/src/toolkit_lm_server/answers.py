"""Answers in JSON, and in msgpack where a client accepts it and a route offers it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from fastapi import Request, Response

from toolkit_lm_server.threads import aside

_JSON = msgspec.json.Encoder().encode
_MSGPACK = msgspec.msgpack.Encoder().encode
_MSGPACK_TYPES = ("application/msgpack", "application/x-msgpack")


async def answer(
    make: Callable[[], dict[str, Any]],
    *,
    is_large: bool = True,
    media_type: str = "application/json",
) -> Response:
    """Answers with the value that `make` returns, in JSON or msgpack.

    `is_large`: a thread makes and encodes it, because millions of numbers would block the event
    loop. It does so for large bodies, too, of which an answer may tell. A value that is an iterator
    is a list whose items are made and encoded one at a time. Other threads run between items only.
    """
    encode = _encoded if media_type == "application/json" else _packed
    body = await (asyncio.to_thread if is_large else aside)(encode, make)
    return Response(body, media_type=media_type)


def accepted(request: Request) -> str:
    """The media type of an answer that may be msgpack. It is JSON unless the client accepts
    msgpack. Arrays take a third more in JSON."""
    for part in request.headers.get("accept", "").split(","):
        kind, *parameters = (text.strip().lower() for text in part.split(";"))
        if kind in _MSGPACK_TYPES and not any(
            text.replace(" ", "") in ("q=0", "q=0.0", "q=0.00", "q=0.000") for text in parameters
        ):
            return kind
    return "application/json"


def encoded(value: Any) -> msgspec.Raw:
    """A value in JSON, to be put into an answer several times."""
    return msgspec.Raw(_JSON(value))


def _encoded(make: Callable[[], dict[str, Any]]) -> bytes:
    return b"{%b}" % b",".join(
        [b"%b:%b" % (_JSON(name), _value(value)) for name, value in make().items()]
    )


def _value(value: Any) -> bytes:
    if isinstance(value, Iterator):
        return b"[%b]" % b",".join([_JSON(item) for item in value])
    return _JSON(value)


def _packed(make: Callable[[], dict[str, Any]]) -> bytes:
    return _MSGPACK({name: _packed_value(value) for name, value in make().items()})


def _packed_value(value: Any) -> Any:
    return [msgspec.Raw(_MSGPACK(item)) for item in value] if isinstance(value, Iterator) else value
