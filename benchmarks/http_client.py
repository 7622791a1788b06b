"""A small HTTP/1.1 client over asyncio streams: one connection per request, little work per event,
and a hang-up wherever it is wanted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

LARGEST_LINE = 2**24


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Exchange:
    """One request that has been sent. `head` first, then `events` or `body`."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self.status = 0
        self.headers: dict[str, str] = {}

    async def head(self) -> int:
        """The status."""
        line = await self._reader.readline()
        if not line:
            raise ConnectionError("the server hung up")
        self.status = int(line.split()[1])
        while (line := await self._reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            self.headers[name.strip().lower()] = value.strip()
        return self.status

    async def body(self) -> bytes:
        if "content-length" in self.headers:
            return await self._reader.readexactly(int(self.headers["content-length"]))
        return b"".join([line async for line in self._chunks()])

    async def events(self) -> AsyncIterator[bytes]:
        """The data of server-sent events, "[DONE]" included. The server writes each event as a
        chunk of its own."""
        async for chunk in self._chunks():
            for event in chunk.split(b"\n\n"):
                if event:
                    yield event.removeprefix(b"data: ")

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := int(await self._reader.readline() or b"0", 16):
            chunk = await self._reader.readexactly(size + 2)
            yield chunk[:-2]


@asynccontextmanager
async def exchange(
    port: int,
    method: str,
    path: str,
    body: bytes = b"",
    *,
    declared: int | None = None,
    source: str = "127.0.0.1",
) -> AsyncIterator[Exchange]:
    """Sends a request. Leaving the context hangs up, whatever is under way.

    `declared`: a content-length other than the body's. `source`: the client's address.
    """
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, limit=LARGEST_LINE, local_addr=(source, 0)
    )
    size = len(body) if declared is None else declared
    head = [
        f"{method} {path} HTTP/1.1",
        "host: 127.0.0.1",
        "connection: close",
        "content-type: application/json",
        f"content-length: {size}",
    ]
    try:
        writer.write("\r\n".join([*head, "", ""]).encode() + body)
        yield Exchange(reader)
    finally:
        writer.close()


async def fetch(
    port: int, method: str, path: str, body: Any = None, *, source: str = "127.0.0.1"
) -> Reply:
    """The whole reply to a request. `body`: bytes, or what is written as JSON."""
    data = b""
    if isinstance(body, bytes):
        data = body
    elif body is not None:
        data = json.dumps(body).encode()
    async with exchange(port, method, path, data, source=source) as one:
        await one.head()
        return Reply(one.status, one.headers, await one.body())
