"""Media that a caller in this process gives as objects, in a form that JSON has."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from toolkit_lm.errors import RequestError
from toolkit_lm.prompts import Conversation

_TEXTS = ("text", "refusal", "thinking")
"""Types of content parts that are not media."""
_MEDIA = (
    "file",
    "input_audio",
    *(
        f"{modality}{form}"
        for modality in ("image", "video", "audio")
        for form in ("", "_url", "_embeds")
    ),
)
"""Types of those that are. Of others, the render server knows."""


def count_media(messages: Conversation) -> tuple[int, int]:
    """The fewest and the most items of media that a conversation has."""
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = (
        part
        for content in contents
        if isinstance(content, list | tuple)
        for part in content
        if isinstance(part, Mapping)
    )
    kinds = [kind for part in parts if (kind := part.get("type", "text")) not in _TEXTS]
    return sum(kind in _MEDIA for kind in kinds), len(kinds)


def plain_messages(messages: Conversation) -> list[Any]:
    """A conversation as `plain` has it. Raises RequestError, naming the item."""
    counts: Counter[str] = Counter()
    return [_plain_message(message, counts) for message in messages]


def with_named(data: Mapping[str, Any], uuids: Mapping[str, Any]) -> dict[str, Any]:
    """`multi_modal_data` with None for each item that has a uuid alone."""
    named = {
        modality: [None] * (len(names) if isinstance(names, list | tuple) else 1)
        for modality, names in uuids.items()
        if data.get(modality) is None and names is not None
    }
    return {**data, **named}


def plain_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """`multi_modal_data` as `plain` has it. Raises RequestError, naming the item."""
    made: dict[str, Any] = {}
    for modality, sources in data.items():
        if (
            not isinstance(sources, list | tuple)
            or (modality == "video" and _is_frames(sources))
            or _has_rate(modality, sources)
        ):
            made[modality] = _plain_item(modality, 1, sources)
        else:
            made[modality] = [
                _plain_item(modality, number, source) for number, source in enumerate(sources, 1)
            ]
    return made


def _plain_message(message: Any, counts: Counter[str]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return plain(message)
    parts = [_plain_part(part, counts) for part in content]
    return {name: parts if name == "content" else plain(value) for name, value in message.items()}


def _plain_part(part: Any, counts: Counter[str]) -> Any:
    """`counts`: items of each modality so far."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _MEDIA:
        return plain(part)
    modality = "audio" if kind == "input_audio" else kind.partition("_")[0]
    counts[modality] += 1
    holds = (kind, modality)
    return {
        name: _plain_item(modality, counts[modality], item) if name in holds else plain(item)
        for name, item in part.items()
    }


def _plain_item(modality: str, number: int, source: Any) -> Any:
    if modality == "video" and _is_frames(source):
        raise RequestError(
            f"video {number}: frames are not sent to a render server: give the bytes of a file, "
            "or its URL.",
            "prompt",
        )
    try:
        return (
            _plain_sound(*source) if _has_rate(modality, source) else _plain_other(modality, source)
        )
    except RequestError as error:
        raise RequestError(f"{modality} {number}: {error}", error.param) from None


def _plain_other(modality: str, source: Any) -> Any:
    if modality == "audio" and getattr(source, "ndim", 0) == 1:
        raise RequestError(
            "samples are sent to a render server as (samples, how many there are in a second).",
            "prompt",
        )
    return plain(source)


def _has_rate(modality: str, source: Any) -> bool:
    """Whether it is one recording's samples, and how many there are in a second."""
    return (
        modality == "audio"
        and isinstance(source, tuple)
        and len(source) == 2
        and isinstance(source[1], int | float)
    )


def _plain_sound(samples: Any, rate: float) -> str:
    """Samples [N], `rate` a second, as a WAV of 32-bit floats. Raises RequestError."""
    samples = _numpy(samples)
    if (
        not isinstance(samples, np.ndarray)
        or samples.ndim != 1
        or samples.dtype.kind not in "fi"
        or not 0 < rate < 2**31
    ):
        raise RequestError(
            "it must be samples [N] of one channel, and how many there are in a second.", "prompt"
        )
    made = samples.astype("<f4")
    if samples.dtype.kind == "i":
        made /= np.float32(np.iinfo(samples.dtype).max)
    described = struct.pack(
        "<4sIHHIIHH", b"fmt ", 16, 3, 1, int(rate), 4 * int(rate) % 2**32, 4, 32
    )
    body = b"WAVE" + described + struct.pack("<4sI", b"data", made.nbytes) + made.tobytes()
    return data_url(b"RIFF" + struct.pack("<I", len(body)) + body, "audio/wav")


def _is_frames(source: Any) -> bool:
    """Whether it is a video that somebody has decoded."""
    if not isinstance(source, list | tuple):
        return getattr(source, "ndim", 0) == 4
    with_fps = isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Mapping)
    return with_fps or (
        bool(source)
        and all(hasattr(image, "convert") or getattr(image, "ndim", 0) == 3 for image in source)
    )


def plain(value: Any) -> Any:
    """`value` with files, pictures and arrays inside as texts: data URLs, or an array's dtype,
    shape and base64. Raises RequestError."""
    if isinstance(value, str | int | float) or value is None:
        return value
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return data_url(bytes(value))
    value = _numpy(value)
    if hasattr(value, "convert") and hasattr(value, "mode"):
        if value.mode in ("I", "F") or value.mode.startswith("I;16"):
            message = (
                f"a picture of Pillow's mode {value.mode} cannot be sent to a render server: "
                "give its file, or one of 8 bits a sample."
            )
            raise RequestError(message, "prompt")
        # An image of Pillow. It would warn that RGB has no room for a palette's transparency.
        opaque = value.convert("RGBA") if "transparency" in value.info else value
        value = np.asarray(opaque.convert("RGB"))
    if isinstance(value, np.ndarray):
        return data_url(_png(value), "image/png") if value.dtype == np.uint8 else _array(value)
    raise RequestError(
        f"a {type(value).__name__} cannot be sent to a render server: give bytes, an array or a "
        "data URL.",
        "prompt",
    )


def _numpy(value: Any) -> Any:
    """A tensor as an array, without an import of torch. numpy knows no bfloat16."""
    if not hasattr(value, "detach"):
        return value
    value = value.detach().cpu()
    return (value.float() if value.is_floating_point() else value).numpy()


def data_url(data: bytes, kind: str = "application/octet-stream") -> str:
    return f"data:{kind};base64,{b64encode(data).decode()}"


def _array(values: np.ndarray) -> dict[str, Any]:
    if values.dtype.kind not in "fiu":
        raise RequestError(
            f"an array of {values.dtype} cannot be sent to a render server.", "multi_modal_data"
        )
    kinds = ("float32", "float16") if values.dtype.kind == "f" else ("int64", "int32")
    kind = values.dtype.name if values.dtype.name in kinds else kinds[0]
    made = np.ascontiguousarray(values, np.dtype(kind).newbyteorder("<"))
    return {"dtype": kind, "shape": list(values.shape), "data": b64encode(made.tobytes()).decode()}


def _png(pixels: np.ndarray) -> bytes:
    """Pixels [height, width], or [height, width, 1, 3 or 4] or these axes in front, as a PNG,
    without loss. Raises RequestError."""
    if pixels.ndim == 3 and pixels.shape[2] not in (1, 3, 4) and pixels.shape[0] in (1, 3, 4):
        pixels = np.moveaxis(pixels, 0, -1)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4) or not pixels.size:
        raise RequestError(
            f"an array must be uint8 [height, width, 3], not of the shape {list(pixels.shape)}.",
            "multi_modal_data",
        )
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2, 4: 6}[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
