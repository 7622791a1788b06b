"""HTTP to MCP servers: to allowed hosts alone, at addresses that were looked up and checked."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httpx
from toolkit_lm.config import parse_memory
from toolkit_lm_media import addresses
from toolkit_lm_media.hosts import name_of, parse, port_of
from toolkit_lm_media.refusal import RefusedError

from toolkit_lm_mcp import Options

_FORBIDDEN = {
    *("accept", "accept-encoding", "connection", "content-encoding", "content-length"),
    *("content-type", "expect", "host", "keep-alive", "proxy-authorization", "te", "trailer"),
    *("transfer-encoding", "upgrade", "mcp-session-id", "mcp-protocol-version"),
}
"""Headers that a request may not set: they are the protocol's."""
_MOST_HEADERS = 32
_MOST_HEADER = 8192


class ServerError(Exception):
    """An MCP server did not answer as it should. `code`: the HTTP status, or the protocol's."""

    def __init__(self, message: str, code: int = 0, kind: str = "mcp_protocol_error") -> None:
        super().__init__(message)
        self.code = code
        self.kind = kind


def check_url(text: str, options: Options) -> httpx.URL:
    """The URL of an MCP server. Raises RefusedError for one that the operator does not allow."""
    url = parse(text)
    wanted = (name_of(url), port_of(url))
    is_private = _is_listed(wanted, url.scheme, options.private_hosts)
    if not is_private and not _is_listed(wanted, url.scheme, options.hosts):
        raise RefusedError(
            f"the host {wanted[0][:200]!r} with port {wanted[1]} is not allowed; the operator "
            "allows hosts with mcp.hosts"
        )
    if url.scheme != "https" and not is_private:
        raise RefusedError("the URL must be one of https")
    return url


def _is_listed(wanted: tuple[str, int], scheme: str, hosts: list[str]) -> bool:
    for host in hosts:
        url = httpx.URL(f"{scheme}://{host}/")
        if wanted == (name_of(url), port_of(url)):
            return True
    return False


def check_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a request to its server. Raises RefusedError."""
    if len(headers) > _MOST_HEADERS:
        raise RefusedError(f"there are more than {_MOST_HEADERS} headers")
    for name, value in headers.items():
        if not isinstance(value, str) or len(name) + len(value) > _MOST_HEADER:
            raise RefusedError(f"headers must be texts of at most {_MOST_HEADER} characters")
        if name.lower() in _FORBIDDEN:
            raise RefusedError(f"the header {name.lower()!r} is the protocol's")
        is_name = name.isascii() and name.replace("-", "a").replace("_", "a").isalnum()
        if not is_name or not value.isascii() or not value.isprintable():
            raise RefusedError("headers must be printable ASCII, and names of letters and digits")
    return dict(headers)


class Connection:
    """Requests to one server, at the addresses that its host had at the start. A later look-up
    could give another address, which nobody has checked."""

    def __init__(self, url: httpx.URL, headers: Mapping[str, str], options: Options) -> None:
        self._url = url
        self._headers = {
            "Host": url.netloc.decode("ascii"),
            "Accept": "application/json, text/event-stream",
            "Accept-Encoding": "identity",
            "User-Agent": "toolkit-lm",
            **headers,
        }
        self._timeout = options.timeout
        self._most_bytes = int(parse_memory(options.max_bytes))
        self._may_be_private = _is_listed(
            (name_of(url), port_of(url)), url.scheme, options.private_hosts
        )
        self._addresses: list[str] = []
        self._client = httpx.AsyncClient(
            follow_redirects=False,
            trust_env=False,
            timeout=options.timeout,
            limits=httpx.Limits(max_connections=4),
        )

    async def open(self) -> None:
        """Looks up the addresses of the host. Raises RefusedError."""
        host = name_of(self._url)
        port = port_of(self._url)
        deadline = time.monotonic() + self._timeout
        if self._may_be_private:
            self._addresses = await _any_address(host, port, self._timeout)
        else:
            self._addresses = await asyncio.to_thread(addresses.resolve, host, port, deadline)

    async def aclose(self) -> None:
        await self._client.aclose()

    @asynccontextmanager
    async def ask(
        self, method: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> AsyncIterator[httpx.Response]:
        """The answer to a request, whose body is not read yet. Raises ServerError."""
        response = await self._send(method, headers, body)
        try:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise ServerError("it answers with a compressed body, which was not asked for")
            yield response
        except httpx.HTTPError as error:
            raise ServerError(f"the connection failed ({type(error).__name__})") from None
        finally:
            await response.aclose()

    async def _send(
        self, method: str, headers: Mapping[str, str], body: bytes | None
    ) -> httpx.Response:
        for number, address in enumerate(self._addresses):
            literal = f"[{address}]" if ":" in address else address
            request = self._client.build_request(
                method,
                self._url.copy_with(host=literal),
                headers={**self._headers, **headers},
                content=body,
                # The certificate is that of the name, whatever the address is.
                extensions={"sni_hostname": name_of(self._url)},
            )
            try:
                return await self._client.send(request, stream=True)
            except httpx.ConnectError:
                if number + 1 == len(self._addresses):
                    raise ServerError("it cannot be reached") from None
            except httpx.HTTPError as error:
                raise ServerError(f"the connection failed ({type(error).__name__})") from None
        raise ServerError("it has no address")

    async def read(self, response: httpx.Response) -> AsyncIterator[bytes]:
        """The pieces of a body. Raises ServerError for one that is too long."""
        size = 0
        async for piece in response.aiter_raw():
            size += len(piece)
            self.check_size(size)
            yield piece

    def check_size(self, size: int) -> None:
        """Raises ServerError for more bytes than an answer may have."""
        if size > self._most_bytes:
            raise ServerError(f"its answer has more than {self._most_bytes} bytes (mcp.max_bytes)")


async def _any_address(host: str, port: int, seconds: float) -> list[str]:
    """The addresses of a host of the operator's, a few at most. Raises RefusedError."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds):
            rows = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError):
        raise RefusedError(f"the host {host!r} has no address") from None
    return [*dict.fromkeys(str(row[4][0]) for row in rows)][:4]
