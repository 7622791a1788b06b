"""Connections to addresses that were checked, up to a deadline."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterable
from typing import Any

import httpcore


class PinnedBackend(httpcore.NetworkBackend):
    """Connects to the first of `addresses` that answers, whatever the name asked for. No name is
    looked up.

    Names stay in the request: TLS, the certificate's check and the Host header use them.
    """

    def __init__(self, addresses: list[str], deadline: float) -> None:
        self._addresses = addresses
        self._deadline = deadline
        self._backend = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        """Raises httpcore.ConnectError where no address answers, ConnectTimeout at the deadline."""
        for address in self._addresses:
            left = remaining(self._deadline, httpcore.ConnectTimeout)
            try:
                stream = self._backend.connect_tcp(
                    address, port, left, local_address, socket_options
                )
            except httpcore.ConnectError:
                continue
            return TimedStream(stream, self._deadline)
        raise httpcore.ConnectError("no address answers")


class TimedStream(httpcore.NetworkStream):
    """A stream of which each operation ends at the deadline: a timeout per read would start anew
    with each byte."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: float) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Raises httpcore.ReadTimeout at the deadline."""
        return self._stream.read(max_bytes, remaining(self._deadline, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Raises httpcore.WriteTimeout at the deadline."""
        self._stream.write(buffer, remaining(self._deadline, httpcore.WriteTimeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        """Raises httpcore.ConnectTimeout at the deadline, ConnectError where the certificate is not
        the host's."""
        left = remaining(self._deadline, httpcore.ConnectTimeout)
        return TimedStream(
            self._stream.start_tls(ssl_context, server_hostname, left), self._deadline
        )

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def remaining(deadline: float, error: type[httpcore.TimeoutException]) -> float:
    """Seconds until `deadline`, above zero. Raises `error` where there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise error("the deadline has passed")
    return left
