"""The Model Context Protocol over streamable HTTP, as far as tools need it.

Source: the protocol's specification, revision 2025-06-18. The package `mcp` brings a web server,
settings and cryptography with it, and its client neither pins addresses nor bounds answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import msgspec
from toolkit_lm import __version__

from toolkit_lm_mcp.connection import Connection, ServerError

_REVISION = "2025-06-18"
_MOST_PAGES = 16
"""Most pages of a list of tools."""
_MOST_SESSION = 1024
"""Most characters of a session's name."""
_LEAVING = 2.0
"""Seconds for a session's end."""


class Session:
    """A session with one server. Requests come one after another."""

    def __init__(self, connection: Connection, seconds: float) -> None:
        """`seconds`: time for each request."""
        self._connection = connection
        self._seconds = seconds
        self._headers: dict[str, str] = {}
        self._number = 0

    async def open(self) -> None:
        """Begins the session. Raises ServerError."""
        about = {
            "protocolVersion": _REVISION,
            "capabilities": {},
            "clientInfo": {"name": "toolkit-lm", "version": __version__},
        }
        result = await self._request("initialize", about)
        revision = result.get("protocolVersion")
        if not isinstance(revision, str) or not revision.isascii() or len(revision) > 32:
            raise ServerError("it names no revision of the protocol")
        self._headers["MCP-Protocol-Version"] = revision
        await self._notify("notifications/initialized")

    async def aclose(self) -> None:
        """Ends the session, if the server answers in time."""
        with contextlib.suppress(ServerError, TimeoutError):
            if "Mcp-Session-Id" in self._headers:
                async with asyncio.timeout(_LEAVING):
                    async with self._connection.ask("DELETE", self._headers):
                        pass

    async def tools(self, most: int) -> list[dict[str, Any]]:
        """All tools of the server. Raises ServerError, also for more than `most`."""
        found: list[dict[str, Any]] = []
        params: dict[str, Any] = {}
        for _ in range(_MOST_PAGES):
            result = await self._request("tools/list", params)
            tools = result.get("tools")
            if not isinstance(tools, list) or not all(map(_is_tool, tools)):
                raise ServerError("its list of tools is malformed")
            found += tools
            if len(found) > most:
                raise ServerError(f"it has more than {most} tools (mcp.max_tools)")
            self._connection.check_size(len(msgspec.json.encode(found)))
            cursor = result.get("nextCursor")
            if not isinstance(cursor, str) or not cursor:
                return found
            params = {"cursor": cursor}
        raise ServerError(f"its list of tools has more than {_MOST_PAGES} pages")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a call: `content`, `isError`. Raises ServerError."""
        return await self._request("tools/call", {"name": name, "arguments": arguments})

    async def _request(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        try:
            async with asyncio.timeout(self._seconds), self._posted(message) as response:
                self._read_session(response)
                async for answer in self._messages(response):
                    if answer.get("id") == number and ("result" in answer or "error" in answer):
                        return _result_of(answer)
        except TimeoutError:
            raise self._late() from None
        raise ServerError(f"it did not answer {method}")

    async def _notify(self, method: str) -> None:
        message = {"jsonrpc": "2.0", "method": method}
        try:
            async with asyncio.timeout(self._seconds), self._posted(message):
                pass
        except TimeoutError:
            raise self._late() from None

    def _late(self) -> ServerError:
        return ServerError(f"it took longer than {self._seconds:g} seconds", 504, "http_error")

    @contextlib.asynccontextmanager
    async def _posted(self, message: Mapping[str, Any]) -> AsyncIterator[httpx.Response]:
        headers = {**self._headers, "Content-Type": "application/json"}
        body = msgspec.json.encode(message)
        async with self._connection.ask("POST", headers, body) as response:
            if response.status_code not in (200, 202):
                status = response.status_code
                raise ServerError(f"it answers with status {status}", status, "http_error")
            yield response

    def _read_session(self, response: httpx.Response) -> None:
        name = response.headers.get("mcp-session-id")
        if name is not None and "Mcp-Session-Id" not in self._headers:
            if len(name) > _MOST_SESSION or not name.isascii() or not name.isprintable():
                raise ServerError("its session has a malformed name")
            self._headers["Mcp-Session-Id"] = name

    async def _messages(self, response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
        """The messages of an answer: one in JSON, or several in events."""
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        pieces = self._connection.read(response)
        if kind == "application/json":
            yield _message(b"".join([piece async for piece in pieces]))
        elif kind == "text/event-stream":
            async for data in _event_data(pieces):
                yield _message(data)
        else:
            raise ServerError(f"it answers with the content type {kind[:100]!r}")


async def _event_data(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events."""
    data: list[bytes] = []
    rest = bytearray()
    async for piece in pieces:
        rest += piece
        if b"\n" not in piece:
            continue
        *lines, rest = rest.split(b"\n")
        for line in (bytes(line.removesuffix(b"\r")) for line in lines):
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []


def _message(text: bytes) -> dict[str, Any]:
    try:
        message = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ServerError("its answer is no JSON") from None
    if not isinstance(message, dict):
        raise ServerError("its answer is no message of JSON-RPC")
    return message


def _result_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(error := answer.get("error"), dict):
        code = error.get("code")
        text = error.get("message")
        raise ServerError(
            text[:500] if isinstance(text, str) else "an error without a message",
            code if isinstance(code, int) else 0,
        )
    result = answer.get("result")
    if not isinstance(result, dict):
        raise ServerError("its answer has no result")
    return result


def _is_tool(tool: Any) -> bool:
    return (
        isinstance(tool, dict)
        and isinstance(tool.get("name"), str)
        and 0 < len(tool["name"]) <= 128
        and isinstance(tool.get("inputSchema"), dict)
        and isinstance(tool.get("description", ""), str | None)
        and isinstance(tool.get("annotations", {}), dict | None)
    )
