"""Images in JSON, as chats have them."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from toolkit_lm.errors import RequestError

_BEGINNINGS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


def image_part(data: str, media_type: str | None = None) -> dict[str, Any]:
    """An image in base64. `media_type`: None where its beginning is to say."""
    return url_part(f"data:{media_type or _sniffed(data)};base64,{data}")


def url_part(url: str) -> dict[str, Any]:
    """An image of a URL, which may be a data URL."""
    return {"type": "image_url", "image_url": {"url": url}}


def _sniffed(data: str) -> str:
    """Media type of base64 data. Raises RequestError if it is not base64. Data that is not an image
    is refused later, when it is decoded."""
    try:
        head = base64.b64decode(data[:16], validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"an image is not base64: {error}.", "images") from error
    return "image/" + next(
        (kind for beginning, kind in _BEGINNINGS.items() if head.startswith(beginning)), "png"
    )
