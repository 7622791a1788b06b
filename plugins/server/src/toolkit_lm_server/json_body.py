"""The JSON body of a request: read within max_body_size, and parsed within bounds of depth, of
values, and of the memory of all bodies together."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any, NoReturn

import msgspec
from fastapi import Request
from pydantic import (
    BaseModel,
    GetCoreSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
)
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_wrap_validator_function
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from toolkit_lm_server.errors import RETRY_AFTER, ApiError, printable
from toolkit_lm_server.fields import Item, Items
from toolkit_lm_server.limits.json_size import measure

_BODIES = 16
"""Bodies of max_body_size that may be read or worked on at a time."""
_COPIES = 5
"""Bytes of memory for each byte of a body: as it came, whole, parsed, checked, and handed on."""
_VALUE = 256
"""Bytes of memory for each value and name of JSON, beside its text: an object of Python, and one of
pydantic."""

SMALL = 2**15
"""Most bytes of a body that the event loop itself works on."""
_FEWEST_VALUES = 2**14
"""Values that JSON may have, however small max_body_size is."""
_BYTES_OF_VALUE = 64
"""Bytes of max_body_size for each value that JSON may have. Each value takes time and memory,
however short it is."""

_TOGETHER = 2**15
"""Bytes of JSON that are decoded together, in some 0.2 ms. No other thread runs meanwhile."""
_CHECKED = 1024
"""Items that are checked together, in some 0.2 ms."""
_SPLIT = 4
"""Levels of nested JSON that are decoded in pieces. Each level is read once more."""
_HEAD = 64
"""Bytes in which the first value of a large body begins. Others are decoded whole."""
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw]).decode

MAX_DEPTH = 100
"""Most levels of nested JSON. Python bounds its recursion, and a reader of values may need several
calls for each level."""


class _InPieces:
    """Has a list checked piece by piece, so that other threads run between the pieces. Not for
    members of unions, whose errors would name this class."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return no_info_wrap_validator_function(_checked, handler(source))


def _checked(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    if not isinstance(value, list) or len(value) <= _CHECKED:
        return check(value)
    try:
        return [
            item
            for begin in range(0, len(value), _CHECKED)
            for item in check(value[begin : begin + _CHECKED])
        ]
    except ValidationError:
        # Its error names the item's place in the whole list.
        return check(value)


ManyItems = Annotated[Items[Item], _InPieces()]
"""Items of which a body may have so many that a check of all takes long."""


class JsonRequest(Request):
    """A request whose JSON is UTF-8, has no NaN or infinity, and is neither nested too deeply nor
    of too many values."""

    def __init__(
        self,
        request: Request,
        body: bytes,
        bodies: Bodies,
        scope: Scope | None = None,
        kind: type[BaseModel] | None = None,
    ) -> None:
        """`scope`: the scope to use in place of the request's own. `kind`: the class of the
        body."""
        super().__init__(scope or request.scope, _replay(body))
        self._bytes = body
        self._bodies = bodies
        self._kind = kind

    async def json(self) -> Any:
        """The parsed body. A large one that is valid is an object of its class, as FastAPI would
        make it.

        Raises JSONDecodeError, and ValueError for an integer with thousands of digits.
        """
        if len(self._bytes) < SMALL:
            return _parse(self._bytes, self._bodies.max_values)
        # The parser lets no other thread run, and so is held to half of the time: one body after
        # the other, with a rest between them.
        async with self._bodies.parsing:
            start = time.perf_counter()
            try:
                return await asyncio.to_thread(self._checked)
            finally:
                await asyncio.sleep(time.perf_counter() - start)

    def _checked(self) -> Any:
        found = _parse(self._bytes, self._bodies.max_values)
        # FastAPI leaves an object of the class as it is, and finds the same errors in others.
        with suppress(ValidationError):
            return found if self._kind is None else self._kind.model_validate(found)
        return found


def _most_values(body: bytes) -> int:
    """Upper bound of JSON's values and names. Texts may have the same characters."""
    return sum(map(body.count, (b"[", b"{", b",", b":")))


def _parse(body: bytes, max_values: int) -> Any:
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH or _most_values(body) >= max_values:
        levels, values = measure(body)
        if levels > MAX_DEPTH:
            raise _invalid(f"it is nested more than {MAX_DEPTH} levels deep")
        if values > max_values:
            raise _invalid(
                f"it has {values} values and names, and may have {max_values}, one for "
                f"{_BYTES_OF_VALUE} bytes that a body may have (max_body_size). Send its parts in "
                "several requests"
            )
    # No other thread runs meanwhile, and msgspec takes half as long. What it refuses is worded by
    # Python's, or taken: halves of characters.
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        return _decoded(body)
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _invalid("it is not UTF-8") from error
    return json.loads(text, parse_constant=_no_constant)


def _decoded(part: bytes | msgspec.Raw, levels: int = _SPLIT) -> Any:
    """The value of JSON. Large objects and lists are decoded in pieces, down to `levels` levels:
    other threads run between the pieces. Raises DecodeError and UnicodeDecodeError."""
    view = memoryview(part)
    if view.nbytes <= _TOGETHER or levels == 0:
        return msgspec.json.decode(part)
    first = bytes(view[:_HEAD]).translate(None, b" \t\r\n")[:2]
    if first[:1] == b"{":
        return {name: _decoded(value, levels - 1) for name, value in _MEMBERS(part).items()}
    # Numbers take a tenth of the time.
    if first not in (b"[{", b"[[", b'["'):
        return msgspec.json.decode(part)
    found: list[Any] = []
    together: list[msgspec.Raw] = []
    size = 0
    for item in _ITEMS(part):
        size += memoryview(item).nbytes
        if memoryview(item).nbytes > _TOGETHER:
            found += [*_joined(together), _decoded(item, levels - 1)]
        elif size <= _TOGETHER:
            together.append(item)
            continue
        else:
            found += _joined([*together, item])
        together = []
        size = 0
    return found + _joined(together)


def _joined(items: list[msgspec.Raw]) -> list[Any]:
    found: list[Any] = msgspec.json.decode(b"[%b]" % b",".join(items))
    return found


def _no_constant(name: str) -> NoReturn:
    raise _invalid(f"{name} is not a number in JSON")


def _invalid(why: str) -> json.JSONDecodeError:
    return json.JSONDecodeError(why, "", 0)


class Bodies:
    """The memory of all bodies that are read or worked on."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_values = max(max_body_bytes // _BYTES_OF_VALUE, _FEWEST_VALUES)
        largest = max_body_bytes * _COPIES + self.max_values * _VALUE
        self._most = _BODIES * max_body_bytes * _COPIES + largest
        self.parsing = asyncio.Lock()
        self._held = 0

    def cost(self, body: bytes) -> int:
        """Bytes of memory that work on a body takes, as if it were JSON. At most `max_values`
        values are parsed."""
        return len(body) * _COPIES + min(_most_values(body), self.max_values) * _VALUE

    @contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """Holds memory for one body. Call the given function with bytes to take. It raises ApiError
        (503) where the others leave no room."""
        held = 0

        def reserve(size: int) -> None:
            nonlocal held
            if self._held + size > self._most:
                headers = {"Retry-After": str(RETRY_AFTER)}
                raise ApiError(
                    503,
                    "The server is busy with other requests' bodies. Try again later.",
                    code="server_busy",
                    headers=headers,
                )
            held += size
            self._held += size

        try:
            yield reserve
        finally:
            self._held -= held


async def read_body(request: Request, most: int, reserve: Callable[[int], None]) -> bytes:
    """The body of a request. Each part's size is passed to `reserve`.

    Raises ApiError (415) for a compressed body, which may be of any size, whatever its number of
    bytes; ApiError (413) as soon as a body is seen to be larger than `most` bytes;
    ClientDisconnect when it breaks off.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise ApiError(
            415,
            f"The body's content-encoding is {printable(encoding)!r}. Send it without compression.",
            code="unsupported_encoding",
        )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most:
        raise _too_large(most)
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        reserve(len(part))
        parts.append(part)
        size += len(part)
        if size > most:
            raise _too_large(most)
        more = message.get("more_body", False)
    return b"".join(parts)


def _too_large(most: int) -> ApiError:
    return ApiError(
        413,
        f"The body is larger than {most} bytes (max_body_size). Shorten it, or send its parts in "
        "several requests.",
        code="request_too_large",
    )


def _replay(body: bytes) -> Receive:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive
