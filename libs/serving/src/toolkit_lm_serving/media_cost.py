"""What items of media can come to cost: bytes of memory, told by what comes with a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Measure = Callable[[Mapping[str, Any], Mapping[str, Any]], tuple[int, int] | None]
"""Renderer.media_size: of a content part, with mm_processor_kwargs."""

_UNKNOWN = 32 * 2**20
_VIDEO = 128 * 2**20
"""Bytes that an item counts as of which the renderer cannot tell, and those of such a video."""
_ENCODED = 3
"""Bytes of each character that an item comes in: the text, the file in it, and a copy."""


def media_cost(given: object, measure: Measure | None = None) -> int:
    """Of the items in a prompt, or in a conversation with its options: what is made of all, and
    what one takes while it is read."""
    parts, options = _parts(given)
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
    """Nothing is made of embeddings."""
    if isinstance(kind, str) and kind.endswith("_embeds"):
        return 0
    return _VIDEO if kind in ("video", "video_url", "file") else _UNKNOWN


def items_of(message: object) -> Iterator[Mapping[str, Any]]:
    """The content parts of a message that are not text."""
    content = message.get("content") if isinstance(message, Mapping) else None
    return (part for part in (content if isinstance(content, list) else ()) if is_item(part))


def is_item(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") not in (None, "text")


def _parts(given: object) -> tuple[Iterator[Mapping[str, Any]], object]:
    """The items as content parts, and the options of their processor."""
    if isinstance(given, Mapping):
        data: Mapping[str, Any] = given.get("multi_modal_data") or {}
        listed = (
            (kind, one)
            for kind, items in data.items()
            for one in (items if isinstance(items, list | tuple) else [items])
        )
        return ({"type": kind, kind: one} for kind, one in listed), given.get("mm_processor_kwargs")
    if not (isinstance(given, tuple) and given and isinstance(given[0], list)):
        return iter(()), None
    options = (
        given[1].get("mm_processor_kwargs")
        if len(given) > 1 and isinstance(given[1], Mapping)
        else None
    )
    return (part for message in given[0] for part in items_of(message)), options


def _length(item: object, depth: int = 5) -> int:
    """Characters or bytes of an item, wherever in it they are."""
    if isinstance(item, str | bytes):
        return len(item)
    if isinstance(item, Mapping) and depth:
        return sum(_length(value, depth - 1) for value in item.values())
    if (num_bytes := getattr(item, "nbytes", None)) is not None:
        return int(num_bytes)
    return len(repr(item)) if isinstance(item, list | Mapping) else 0
