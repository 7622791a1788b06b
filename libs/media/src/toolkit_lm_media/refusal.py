"""The reason why an item is refused, before anybody names the item."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from toolkit_lm.errors import RequestError


class RefusedError(Exception):
    """An item is refused. The text is a clause that goes on after "image 2: "."""


@contextmanager
def named(label: str, param: str | None) -> Iterator[None]:
    """Turns RefusedError into a RequestError that begins with `label`."""
    try:
        yield
    except RefusedError as refusal:
        # Without the cause: a log would otherwise show addresses and pieces of the data.
        raise RequestError(f"{label}: {refusal}", param) from None


def size_text(count: int) -> str:
    """A number of bytes for people, such as "25 MiB"."""
    return f"{count / 2**20:.4g} MiB" if count >= 2**20 else f"{count} bytes"
