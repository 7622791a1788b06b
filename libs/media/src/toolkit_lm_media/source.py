"""Reads the source of a media item: bytes, a data URL, or a URL."""

from __future__ import annotations

from toolkit_lm_media import data_url
from toolkit_lm_media.limits import MediaLimits
from toolkit_lm_media.refusal import RefusedError, named, size_text

_MOST_SCHEME = 16
"""Characters of a text that are searched for a scheme."""


def load_bytes(
    source: bytes | str, limits: MediaLimits, *, label: str = "media", param: str | None = None
) -> bytes:
    """The bytes of one item, at least 1 and at most `limits.max_bytes`. It blocks for
    `limits.timeout` seconds at most.

    `label` names the item in errors, such as "image 2". Raises RequestError where the item is
    refused.
    """
    with named(label, param):
        data = source if isinstance(source, bytes) else _from_text(source, limits)
        require_size(data, limits)
        return data


def require_size(data: bytes, limits: MediaLimits) -> None:
    """Raises RefusedError if there are no bytes, or more than `limits.max_bytes`."""
    if not data:
        raise RefusedError("it is empty")
    if len(data) > limits.max_bytes:
        raise RefusedError(
            f"it has {size_text(len(data))}, more than the {size_text(limits.max_bytes)} that "
            "are taken"
        )


def _from_text(text: str, limits: MediaLimits) -> bytes:
    scheme, colon, _ = text[:_MOST_SCHEME].partition(":")
    match scheme.lower() if colon else "":
        case "data":
            return data_url.decode(text, limits.max_bytes)
        case "http" | "https":
            # Here, because most processes never fetch.
            from toolkit_lm_media.fetch import fetch

            return fetch(text, limits)
    raise RefusedError("it is none of a data URL, an http URL and an https URL")
