"""The hosts that an operator allows."""

from __future__ import annotations

import re

import httpx

from toolkit_lm_media.limits import MediaLimits
from toolkit_lm_media.refusal import RefusedError

_PORTS = {"http": 80, "https": 443}
_MOST_URL = 8192
"""Characters."""
_ODD = re.compile(r"[\x00-\x20\x7f\\]")


def parse(text: str) -> httpx.URL:
    """A URL with a scheme of http or https, and a host. Raises RefusedError for any other text."""
    if len(text) > _MOST_URL:
        raise RefusedError(f"the URL has more than {_MOST_URL} characters")
    if _ODD.search(text):
        raise RefusedError("the URL has a space, a control character or a backslash")
    try:
        return checked(httpx.URL(text))
    except (httpx.InvalidURL, ValueError):
        raise RefusedError("the URL is malformed") from None


def checked(url: httpx.URL) -> httpx.URL:
    """`url` itself. Raises RefusedError where it has another scheme, no host, or a user's name."""
    if url.scheme not in _PORTS:
        raise RefusedError("the URL is not one of http or https")
    if url.userinfo:
        raise RefusedError("the URL has a user's name in it")
    if not 0 < port_of(url) < 2**16:
        raise RefusedError("the URL's port is out of range")
    if not name_of(url):
        raise RefusedError("the URL has no host")
    return url


def name_of(url: httpx.URL) -> str:
    """The host in lower case, in IDNA's ASCII form, without a trailing dot or brackets."""
    return url.raw_host.decode("ascii").lower().removesuffix(".")


def port_of(url: httpx.URL) -> int:
    """The port, which is the scheme's where the URL has none."""
    return _PORTS[url.scheme] if url.port is None else url.port


def require_allowed(url: httpx.URL, limits: MediaLimits) -> None:
    """Raises RefusedError unless the host and port are in `limits.allowed_hosts`."""
    wanted = (name_of(url), port_of(url))
    if not any(wanted == _entry(host, url.scheme) for host in limits.allowed_hosts):
        host = wanted[0] if wanted[1] == _PORTS[url.scheme] else f"{wanted[0]}:{wanted[1]}"
        raise RefusedError(
            f"the host {host[:200]!r} is not allowed; the operator allows hosts with "
            "allowed_media_hosts"
        )


def _entry(host: str, scheme: str) -> tuple[str, int] | None:
    try:
        url = httpx.URL(f"{scheme}://{host}/")
    except (httpx.InvalidURL, ValueError):
        # An entry that is no host allows nothing.
        return None
    return name_of(url), port_of(url)
