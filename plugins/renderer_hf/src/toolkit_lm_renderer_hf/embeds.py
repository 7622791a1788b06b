"""Outputs of encoders, as callers give them in the place of an image: arrays of numpy or torch, or
arrays in JSON."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from toolkit_lm.errors import RequestError

_TYPES = ("float32", "float16", "int64", "int32")
"""Element types of arrays in JSON."""
_KEYS = {"dtype", "shape", "data"}
_MOST_ENTRIES = 64
"""Most entries of an array given as a list: enough for a grid of patches, too few for embeddings.
"""
_MOST_ARRAYS = 8


def read_embeds(modality: str, source: Any, max_bytes: int) -> dict[str, np.ndarray]:
    """The named arrays: `embeds` [n, hidden size], float32, and any other arrays the model needs.
    Raises RequestError.

    `source`: the embeddings alone, or a mapping with `embeds` (or `image_embeds`). In JSON, an
    array is {"dtype", "shape", "data"}, where data is base64, in C order, little-endian."""
    if not isinstance(source, Mapping) or set(source) == _KEYS:
        source = {"embeds": source}
    if len(source) > _MOST_ARRAYS:
        raise RequestError(
            f"its embeddings come with {len(source)} arrays; there may be {_MOST_ARRAYS}."
        )
    found = {
        "embeds" if name == f"{modality}_embeds" else str(name): _array(value, max_bytes)
        for name, value in source.items()
    }
    embeds = found.get("embeds")
    if embeds is not None and embeds.ndim == 3 and len(embeds) == 1:
        embeds = embeds[0]
    if embeds is None or embeds.ndim != 2 or embeds.dtype.kind != "f" or not embeds.size:
        raise RequestError("its embeddings must be floats of the shape [n, hidden size].")
    found["embeds"] = embeds.astype(np.float32, copy=False)
    if sum(array.nbytes for array in found.values()) > max_bytes:
        raise RequestError(
            f"its arrays have more than the {max_bytes} bytes that are taken (max_media_bytes)."
        )
    if not all(np.isfinite(array).all() for array in found.values()):
        raise RequestError("its arrays hold numbers that are not finite.")
    return {name: np.ascontiguousarray(array) for name, array in found.items()}


def _array(value: Any, max_bytes: int) -> np.ndarray:
    if isinstance(value, Mapping):
        return _decoded(value, max_bytes)
    if isinstance(value, list | tuple):
        return _listed(value)
    if hasattr(value, "detach"):
        # A tensor, without an import of torch. numpy knows no bfloat16.
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu":
        raise RequestError(
            f"its embeddings must be arrays of numbers: of numpy, of torch, or {_form()}; not a "
            f"{type(value).__name__}."
        )
    return value.astype(value.dtype.newbyteorder("="), copy=False)


def _decoded(value: Mapping[Any, Any], max_bytes: int) -> np.ndarray:
    kind = value.get("dtype")
    shape = value.get("shape")
    data = value.get("data")
    if (
        set(value) != _KEYS
        or kind not in _TYPES
        or not isinstance(data, str)
        or not isinstance(shape, list)
        or len(shape) > 4
        or any(type(number) is not int or not 0 <= number < 2**31 for number in shape)
    ):
        raise RequestError(f"an array must be {_form()}, dtype one of {', '.join(_TYPES)}.")
    if len(data) // 4 * 3 > max_bytes + 2:
        raise RequestError(
            f"its arrays have more than the {max_bytes} bytes that are taken (max_media_bytes)."
        )
    try:
        content = binascii.a2b_base64(data, strict_mode=True)
    except (ValueError, UnicodeEncodeError):
        raise RequestError("the base64 of an array is broken.") from None
    made = np.dtype(kind).newbyteorder("<")
    if math.prod(shape) * made.itemsize != len(content):
        raise RequestError(f"an array of shape {shape} and dtype {kind} has {len(content)} bytes.")
    return np.frombuffer(content, made).reshape(shape).astype(kind, copy=False)


def _listed(value: list[Any] | tuple[Any, ...]) -> np.ndarray:
    rows = [row if isinstance(row, list | tuple) else [row] for row in value[: _MOST_ENTRIES + 1]]
    numbers = [number for row in rows for number in row[: _MOST_ENTRIES + 1]]
    if len(numbers) > _MOST_ENTRIES or not all(
        type(number) is int and abs(number) < 2**63 for number in numbers
    ):
        raise RequestError(
            f"an array in a list must have at most {_MOST_ENTRIES} integers; longer ones are "
            f"{_form()}."
        )
    try:
        return np.array(value, np.int64)
    except ValueError:
        raise RequestError("an array in a list must have rows of one length.") from None


def _form() -> str:
    return "{'dtype', 'shape', 'data': base64}"


def encode_array(array: np.ndarray) -> dict[str, Any]:
    """An array in JSON, as `read_embeds` takes it."""
    kind = str(array.dtype)
    content = np.ascontiguousarray(array, np.dtype(kind).newbyteorder("<")).tobytes()
    return {"dtype": kind, "shape": list(array.shape), "data": base64.b64encode(content).decode()}
