"""Links to the server, and when to leave it alone. Needs no torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit_lm_kv_redis.limits import PASSWORD, address_of, password_of

# Engines without such a tier do not load it.
if TYPE_CHECKING:
    from redis import Redis

logger = logging.getLogger(__name__)

VERSION = 1
"""Version of keys and of frames."""
_CONNECT = 1.0
"""Most seconds of a connection's start."""
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0
"""Seconds for which a server that fails is left alone: at first, and at most."""
_QUIET = 60.0
"""Least seconds between two warnings of a link."""


def connect(options: Any, timeout: float) -> Redis:
    """A client with one connection, which opens at its first command. `timeout`: most seconds for
    which the server may be silent. Raises ConfigError for files that cannot be read."""
    from redis import Redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    address = address_of(options.url)
    ca_file = None if options.ca_file is None else str(Path(options.ca_file).expanduser())
    place: dict[str, Any] = (
        {"unix_socket_path": address.socket}
        if address.socket is not None
        else {"host": address.host, "port": address.port, "db": address.db}
    )
    if address.tls:
        place |= {"ssl": True, "ssl_ca_certs": ca_file, "ssl_check_hostname": True}
    return Redis(
        **place,
        username=address.username,
        password=password_of(options),
        socket_timeout=timeout,
        socket_connect_timeout=_CONNECT,
        # A server that does not answer is left alone, and not asked again at once.
        retry=Retry(NoBackoff(), 0),
        decode_responses=False,
    )


def prefix_of(options: Any, identity: bytes) -> str:
    """The first part of the keys of an identity's blocks."""
    return f"{options.namespace}:{VERSION}:{identity.hex()[:32]}:"


def key_of(prefix: str, rank: int, group: int, name: bytes) -> str:
    """Key of a rank's block."""
    return f"{prefix}{rank}:{group}:{name.hex()}"


class Breaker:
    """Leaves a server alone for a time after a failure, longer after each. Warns once for all
    failures in a row."""

    def __init__(self, text: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`text`: what cannot be done while the server fails."""
        self._text = text
        self._clock = clock
        self._pause = 0.0
        self._until = 0.0
        self._warned = -_QUIET

    @property
    def is_open(self) -> bool:
        """Whether the server is to be left alone."""
        return self._clock() < self._until

    @property
    def wait(self) -> float:
        """Seconds for which the server is still left alone."""
        return max(0.0, self._until - self._clock())

    def failed(self, error: BaseException) -> None:
        """The server has failed."""
        now = self._clock()
        if not self._pause and now >= self._warned + _QUIET:
            self._warned = now
            from redis.exceptions import AuthenticationError

            hint = f" Set {PASSWORD}." if isinstance(error, AuthenticationError) else ""
            logger.warning(
                "%s. It is tried again later: %s: %s%s",
                self._text,
                type(error).__name__,
                error,
                hint,
            )
        self._pause = min(max(2 * self._pause, _FIRST_PAUSE), _LONGEST_PAUSE)
        self._until = now + self._pause

    def worked(self) -> None:
        """The server has done what it was asked for."""
        self._pause = 0.0
        self._until = 0.0
