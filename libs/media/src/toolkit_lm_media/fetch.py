"""Fetches over http and https, from allowed hosts at public addresses."""

from __future__ import annotations

import ssl
import time
from functools import cache

import httpcore
import httpx

from toolkit_lm_media import addresses
from toolkit_lm_media.connection import PinnedBackend
from toolkit_lm_media.hosts import checked, name_of, parse, port_of, require_allowed
from toolkit_lm_media.limits import MediaLimits
from toolkit_lm_media.refusal import RefusedError, size_text

_HEADERS = (
    ("Accept", "image/*, video/*"),
    ("Accept-Encoding", "identity"),
    ("User-Agent", "toolkit-lm-media"),
)
_REDIRECTS = {301, 302, 303, 307, 308}


def fetch(text: str, limits: MediaLimits) -> bytes:
    """The body behind a URL. Redirects are followed, each as if it were the first URL.

    Raises RefusedError for a host that is not allowed or not public, a status other than 200, too
    many bytes, redirects or seconds.
    """
    deadline = time.monotonic() + limits.timeout
    url = parse(text)
    for _ in range(limits.max_redirects + 1):
        require_allowed(url, limits)
        answer = _ask(url, limits, deadline)
        if isinstance(answer, bytes):
            return answer
        url = answer
    raise RefusedError(f"the URL redirects more than {limits.max_redirects} times")


def _ask(url: httpx.URL, limits: MediaLimits, deadline: float) -> bytes | httpx.URL:
    """The body, or the URL of the redirect."""
    host = name_of(url)
    port = port_of(url)
    backend = PinnedBackend(addresses.resolve(host, port, deadline), deadline)
    origin = httpcore.Origin(url.raw_scheme, host.encode("ascii"), port)
    context = _ssl_context() if url.scheme == "https" else None
    target = httpcore.URL(scheme=url.raw_scheme, host=origin.host, port=port, target=url.raw_path)
    headers = [("Host", _host_header(url)), *_HEADERS]
    try:
        with (
            httpcore.HTTPConnection(
                origin, ssl_context=context, network_backend=backend
            ) as connection,
            connection.stream("GET", target, headers=headers) as response,
        ):
            return (
                _redirect(url, response)
                if response.status in _REDIRECTS
                else _body(response, limits)
            )
    except httpcore.TimeoutException:
        raise RefusedError(
            f"the fetch from {host!r} took longer than {limits.timeout:g} seconds"
        ) from None
    # OSError too: httpcore does not map every error of TLS.
    except (httpcore.NetworkError, httpcore.ProtocolError, OSError):
        raise RefusedError(f"the fetch from {host!r} failed") from None


def _redirect(url: httpx.URL, response: httpcore.Response) -> httpx.URL:
    location = _header(response, b"location")
    if not location:
        raise RefusedError("the URL redirects to nowhere")
    try:
        return checked(parse(str(url.join(location))))
    except (httpx.InvalidURL, ValueError):
        raise RefusedError("the URL redirects to a malformed URL") from None


def _body(response: httpcore.Response, limits: MediaLimits) -> bytes:
    if response.status != 200:
        raise RefusedError(f"the URL answers with status {response.status}")
    if _header(response, b"content-encoding").lower() not in ("", "identity"):
        raise RefusedError("the URL answers with a compressed body, which was not asked for")
    length = _header(response, b"content-length")
    too_long = RefusedError(f"the URL holds more than {size_text(limits.max_bytes)}")
    if length.isdecimal() and int(length) > limits.max_bytes:
        raise too_long
    body = bytearray()
    for part in response.iter_stream():
        body += part
        if len(body) > limits.max_bytes:
            raise too_long
    return bytes(body)


def _header(response: httpcore.Response, name: bytes) -> str:
    """All values of one header, joined by commas; "" where there is none."""
    return ", ".join(
        value.decode("latin-1").strip() for key, value in response.headers if key.lower() == name
    )


def _host_header(url: httpx.URL) -> str:
    host = name_of(url)
    host = f"[{host}]" if ":" in host else host
    return host if url.port is None else f"{host}:{url.port}"


@cache
def _ssl_context() -> ssl.SSLContext:
    """Made once: reading the certificates takes longer than many a fetch."""
    return httpx.create_ssl_context()
