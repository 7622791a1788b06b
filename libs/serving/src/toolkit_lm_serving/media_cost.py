"""Costs of media items: bytes of memory, known from the request alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Measure = Callable[[Mapping[str, Any], Mapping[str, Any]], tuple[int, int] | None]
"""The signature of Renderer.media_size: a content part, and mm_processor_kwargs."""

_UNKNOWN = 32 * 2**20
_VIDEO = 128 * 2**20
"""Bytes that a video counts as where the renderer cannot tell. `_UNKNOWN` is for other items."""
_ENCODED = 3
"""Bytes for each character in which an item comes: the text, the file in it, and a copy."""


def media_cost(prompt: object, measure: Measure | None = None) -> int:
    """The cost of the items in a prompt, or in a conversation with its options. It adds what is
    made of all items, and what reading the largest one takes."""
    parts, options = _parts(prompt)
    total = most = 0
    for part in parts:
        found = (
            None
            if measure is None
            else measure(part, options if isinstance(options, Mapping) else {})
        )
        kept, meanwhile = found if found is not None else (_unknown(part.get("type")), 0)
        total += kept + _ENCODED * _length(part)
        most = max(most, meanwhile)
    return total + most


def _unknown(kind: object) -> int:
    """Bytes of an item that the renderer cannot tell. Embeddings count as none."""
    if isinstance(kind, str) and kind.endswith("_embeds"):
        return 0
    return _VIDEO if kind in ("video", "video_url", "file") else _UNKNOWN


def items_of(message: object) -> Iterator[Mapping[str, Any]]:
    """The content parts of a message that are not text."""
    content = message.get("content") if isinstance(message, Mapping) else None
    return (part for part in (content if isinstance(content, list) else ()) if is_item(part))


def is_item(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") not in (None, "text")


def _parts(prompt: object) -> tuple[Iterator[Mapping[str, Any]], object]:
    """The items as content parts, and the options of their processor."""
    if isinstance(prompt, Mapping) and "content" in prompt:
        return items_of(prompt), None
    if isinstance(prompt, Mapping):
        data: Mapping[str, Any] = prompt.get("multi_modal_data") or {}
        listed = (
            (kind, item)
            for kind, items in data.items()
            for item in (items if isinstance(items, list | tuple) else [items])
        )
        return ({"type": kind, kind: item} for kind, item in listed), prompt.get(
            "mm_processor_kwargs"
        )
    if not (isinstance(prompt, tuple) and prompt and isinstance(prompt[0], list)):
        return iter(()), None
    options = (
        prompt[1].get("mm_processor_kwargs")
        if len(prompt) > 1 and isinstance(prompt[1], Mapping)
        else None
    )
    return (part for message in prompt[0] for part in items_of(message)), options


def _length(item: object, depth: int = 5) -> int:
    """Characters or bytes of an item, at any depth."""
    if isinstance(item, str | bytes):
        return len(item)
    if isinstance(item, Mapping) and depth:
        return sum(_length(value, depth - 1) for value in item.values())
    if (num_bytes := getattr(item, "nbytes", None)) is not None:
        return int(num_bytes)
    return len(repr(item)) if isinstance(item, list | Mapping) else 0
