"""The bounds on one item of media."""

from __future__ import annotations

import re
from dataclasses import dataclass

from toolkit_lm.errors import ConfigError

MOST_PIXELS = 89_478_485
"""Above it, Pillow warns of every image."""
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s/@:\\\[\]#?%]+)(:[0-9]{1,5})?")


@dataclass(frozen=True)
class MediaLimits:
    """What one item may cost. No host is allowed by default.

    An allowed host is a name, at its scheme's port, or `name:port`. Raises ConfigError for a bound that makes no sense.
    """

    max_bytes: int = 25 * 2**20
    """Of the file, encoded as PNG or the like."""
    max_pixels: int = 36_000_000
    """Width times height."""
    timeout: float = 10.0
    """Seconds for a whole fetch, redirects and name look-ups included."""
    max_redirects: int = 3
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_bytes < 1:
            raise ConfigError(f"max_bytes is {self.max_bytes}; it must be at least 1.")
        if not 1 <= self.max_pixels <= MOST_PIXELS:
            raise ConfigError(f"max_pixels is {self.max_pixels}; it must be from 1 to {MOST_PIXELS}.")
        if not 0 < self.timeout < float("inf"):
            raise ConfigError(f"timeout is {self.timeout}; it must be a positive number of seconds.")
        if self.max_redirects < 0:
            raise ConfigError(f"max_redirects is {self.max_redirects}; it must be at least 0.")
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise ConfigError(f"{host!r} in --allowed-media-hosts is not a host: give a name such as 'example.com', or 'name:port'.")
