"""The bounds on one item of media."""

from __future__ import annotations

import re
from dataclasses import dataclass

from toolkit_lm.errors import ConfigError

MOST_PIXELS = 89_478_485
"""Above it, Pillow warns of every image."""
_DECODED = {"movie": 64, "animation": 8}
"""So many frames of the most pixels, or more of fewer, are decoded. Frames that are not taken
count: later ones need them."""
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s/@:\\\[\]#?%]+)(:[0-9]{1,5})?")


@dataclass(frozen=True)
class MediaLimits:
    """Limits for one item. No host is allowed by default.

    An allowed host is a name, at its scheme's port, or `name:port`. Raises ConfigError for a limit
    that makes no sense."""

    max_bytes: int = 25 * 2**20
    """Bytes of the encoded file (PNG or the like)."""
    max_pixels: int = 36_000_000
    """Width times height, of a picture or a frame."""
    max_frames: int = 768
    """Taken of a video, which may have more."""
    max_seconds: float = 3600.0
    """Seconds of a video."""
    max_audio_seconds: float = 600.0
    """Seconds of a recording."""
    timeout: float = 10.0
    """Seconds for a whole fetch, redirects and name look-ups included."""
    max_redirects: int = 3
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_bytes < 1:
            raise ConfigError(f"max_bytes is {self.max_bytes}; it must be at least 1.")
        if not 1 <= self.max_pixels <= MOST_PIXELS:
            raise ConfigError(
                f"max_pixels is {self.max_pixels}; it must be from 1 to {MOST_PIXELS}."
            )
        if self.max_frames < 1:
            raise ConfigError(f"max_frames is {self.max_frames}; it must be at least 1.")
        for name, seconds in (
            ("max_seconds", self.max_seconds),
            ("max_audio_seconds", self.max_audio_seconds),
        ):
            if not 0 < seconds < float("inf"):
                raise ConfigError(f"{name} is {seconds}; it must be a positive number.")
        if not 0 < self.timeout < float("inf"):
            raise ConfigError(
                f"timeout is {self.timeout}; it must be a positive number of seconds."
            )
        if self.max_redirects < 0:
            raise ConfigError(f"max_redirects is {self.max_redirects}; it must be at least 0.")
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise ConfigError(
                    f"{host!r} in allowed_media_hosts is not a host: give a name such as "
                    "'example.com', or 'name:port'."
                )

    def most_decoded(self, kind: str) -> int:
        """Pixels of all frames of a movie or an animation together."""
        return _DECODED[kind] * self.max_pixels
