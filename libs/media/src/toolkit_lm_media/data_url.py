"""Data URLs: `data:image/png;base64,...`."""

from __future__ import annotations

import binascii

from toolkit_lm_media.refusal import RefusedError, size_text

_MOST_HEAD = 256
"""Characters before the comma."""


def decode(url: str, max_bytes: int) -> bytes:
    """The bytes of a data URL. The media type is not looked at: the bytes tell the format.

    Raises RefusedError where it is too long, is not base64, or is not canonical base64.
    """
    comma = url.find(",", 0, _MOST_HEAD)
    if comma < 0 or not url[:comma].lower().endswith(";base64"):
        raise RefusedError(
            "the data URL is not of the form 'data:image/png;base64,...'; only base64 is taken"
        )
    length = len(url) - comma - 1
    padding = 2 if url.endswith("==") else int(url.endswith("="))
    if length // 4 * 3 - padding > max_bytes:
        raise RefusedError(f"the data URL holds more than {size_text(max_bytes)}")
    try:
        return binascii.a2b_base64(url[comma + 1 :], strict_mode=True)
    except ValueError:
        raise RefusedError("the data URL's base64 is broken") from None


def beginning(url: str, num_bytes: int = 96) -> bytes:
    """The first bytes of the file in a data URL, a multiple of 3; nothing where there is none."""
    comma = url.find(",", 0, _MOST_HEAD)
    if comma < 0 or url[:5].lower() != "data:":
        return b""
    try:
        return binascii.a2b_base64(url[comma + 1 : comma + 1 + num_bytes // 3 * 4])
    except ValueError:
        return b""
