"""Answers in JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from fastapi import Response

_encode = msgspec.json.Encoder().encode


async def answer(make: Callable[[], dict[str, Any]], *, is_large: bool = True) -> Response:
    """What `make` returns, as JSON. Millions of numbers take their time: not on the event loop.

    A value that is an iterator is a list of which one item at a time is made and encoded. Other threads run between items only.
    """
    body = await asyncio.to_thread(_encoded, make) if is_large else _encoded(make)
    return Response(body, media_type="application/json")


def encoded(value: Any) -> msgspec.Raw:
    """A value that an answer has several times."""
    return msgspec.Raw(_encode(value))


def _encoded(make: Callable[[], dict[str, Any]]) -> bytes:
    return b"{%b}" % b",".join([b"%b:%b" % (_encode(name), _value(value)) for name, value in make().items()])


def _value(value: Any) -> bytes:
    if isinstance(value, Iterator):
        return b"[%b]" % b",".join([_encode(item) for item in value])
    return _encode(value)
