"""The addresses of a host: looked up once, all of them public."""

from __future__ import annotations

import queue
import socket
import threading
import time
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

from toolkit_lm_media.refusal import RefusedError

_MOST_ADDRESSES = 4
"""That a connection is tried to."""
_NAT64 = IPv6Network("64:ff9b::/96")
_LOCAL_NAT64 = IPv6Network("64:ff9b:1::/48")


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether anybody on the internet has this address. An IPv4 address inside an IPv6 address
    counts."""
    if isinstance(address, IPv6Address):
        whole = _translated(address)
        if whole is not None:
            return is_public(whole)
        if address.sixtofour is not None:
            # From 3.13 on, Python calls none of them global.
            return is_public(address.sixtofour)
        if address in _LOCAL_NAT64 or address.is_site_local:
            return False
    return address.is_global and not (
        address.is_private
        or address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_reserved
        or address.is_unspecified
    )


def resolve(host: str, port: int, deadline: float) -> list[str]:
    """The addresses of `host`, a few at most. `deadline` is in time.monotonic()'s seconds.

    Raises RefusedError where there is none, where any is not public, or where the look-up is late.
    """
    try:
        found = [ip_address(text) for text in _look_up(host, port, deadline)]
    except (OSError, ValueError):
        found = []
    if not found:
        raise RefusedError(f"the host {host!r} has no address")
    if not all(is_public(address) for address in found):
        raise RefusedError(
            f"the host {host!r} has an address that is not public, such as one of the local network"
        )
    return [str(address) for address in found][:_MOST_ADDRESSES]


def _translated(address: IPv6Address) -> IPv4Address | None:
    """The IPv4 address that is reached through `address`, where it is one by another name."""
    return IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else address.ipv4_mapped


def _look_up(host: str, port: int, deadline: float) -> list[str]:
    """The addresses as texts, each once. Raises OSError, or RefusedError at the deadline."""
    answers: queue.SimpleQueue[list[str] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answers.put(list(dict.fromkeys(str(row[4][0]) for row in rows)))
        except Exception as error:
            answers.put(error)

    # In a thread, because a look-up takes no timeout.
    threading.Thread(target=ask, name="media-lookup", daemon=True).start()
    try:
        answer = answers.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        raise RefusedError(f"the look-up of the host {host!r} took too long") from None
    if isinstance(answer, Exception):
        raise answer
    return answer
