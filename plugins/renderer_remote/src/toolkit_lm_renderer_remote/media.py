"""Media that a caller in this process gives as objects, in a form that JSON has."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from toolkit_lm.errors import RequestError
from toolkit_lm.prompts import Conversation

_TEXTS = ("text", "refusal", "thinking")
"""Types of content parts that are no media."""


def count_media(messages: Conversation) -> int:
    """Content parts of a conversation that may be items of media."""
    count = 0
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list | tuple):
            count += sum(isinstance(part, Mapping) and part.get("type", "text") not in _TEXTS for part in content)
    return count


def plain(value: Any) -> Any:
    """`value` with files, pictures and arrays inside as texts: data URLs, or an array's dtype, shape and base64. Raises RequestError."""
    if isinstance(value, str | int | float) or value is None:
        return value
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return data_url(bytes(value))
    if isinstance(value, Path):
        try:
            return data_url(value.read_bytes())
        except OSError as error:
            raise RequestError(f"{str(value)!r} cannot be read: {error.strerror}.", "multi_modal_data") from None
    if isinstance(value, np.ndarray):
        values = np.ascontiguousarray(value)
        return {"dtype": str(values.dtype), "shape": list(values.shape), "data": b64encode(values.tobytes()).decode()}
    if hasattr(value, "save") and hasattr(value, "mode"):
        return data_url(_png(value), "image/png")
    raise RequestError(f"a {type(value).__name__} cannot be sent to a render server: give bytes, an array or a data URL.", "prompt")


def data_url(data: bytes, kind: str = "application/octet-stream") -> str:
    return f"data:{kind};base64,{b64encode(data).decode()}"


def _png(image: Any) -> bytes:
    """A Pillow image, without loss."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()
