"""Media that a caller in this process gives as objects, in a form that JSON has."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import numpy as np
from toolkit_lm.errors import RequestError
from toolkit_lm.prompts import Conversation

_TEXTS = ("text", "refusal", "thinking")
"""Types of content parts that are no media."""
_MEDIA = ("file", "input_audio", *(f"{modality}{form}" for modality in ("image", "video", "audio") for form in ("", "_url", "_embeds")))
"""Types of those that are. Of others, the render server knows."""


def count_media(messages: Conversation) -> tuple[int, int]:
    """The fewest and the most items of media that a conversation has."""
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = (part for content in contents if isinstance(content, list | tuple) for part in content if isinstance(part, Mapping))
    kinds = [kind for part in parts if (kind := part.get("type", "text")) not in _TEXTS]
    return sum(kind in _MEDIA for kind in kinds), len(kinds)


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
    if hasattr(value, "detach"):
        # A tensor, without an import of torch. numpy knows no bfloat16.
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    if hasattr(value, "convert") and hasattr(value, "mode"):
        # An image of Pillow. It would warn that RGB has no room for a palette's transparency.
        opaque = value.convert("RGBA") if "transparency" in value.info else value
        value = np.asarray(opaque.convert("RGB"))
    if isinstance(value, np.ndarray):
        return data_url(_png(value), "image/png") if value.dtype == np.uint8 else _array(value)
    raise RequestError(f"a {type(value).__name__} cannot be sent to a render server: give bytes, an array or a data URL.", "prompt")


def data_url(data: bytes, kind: str = "application/octet-stream") -> str:
    return f"data:{kind};base64,{b64encode(data).decode()}"


def _array(values: np.ndarray) -> dict[str, Any]:
    if values.dtype.kind not in "fiu":
        raise RequestError(f"an array of {values.dtype} cannot be sent to a render server.", "multi_modal_data")
    kinds = ("float32", "float16") if values.dtype.kind == "f" else ("int64", "int32")
    kind = values.dtype.name if values.dtype.name in kinds else kinds[0]
    made = np.ascontiguousarray(values, np.dtype(kind).newbyteorder("<"))
    return {"dtype": kind, "shape": list(values.shape), "data": b64encode(made.tobytes()).decode()}


def _png(pixels: np.ndarray) -> bytes:
    """Pixels [height, width], or [height, width, 1, 3 or 4] or these axes in front, as a PNG, without loss. Raises RequestError."""
    if pixels.ndim == 3 and pixels.shape[2] not in (1, 3, 4) and pixels.shape[0] in (1, 3, 4):
        pixels = np.moveaxis(pixels, 0, -1)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4) or not pixels.size:
        raise RequestError(f"an array must be uint8 [height, width, 3], not of the shape {list(pixels.shape)}.", "multi_modal_data")
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2, 4: 6}[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
