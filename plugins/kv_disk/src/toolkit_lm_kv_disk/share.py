"""Messages between the engine and the front. Importing it needs no torch."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec
from msgspec import Struct

PART = "kv_disk"
SAVE = "kv_disk.save"
"""Key of a request's context: the request's prompt gets a name."""


class Save(Struct):
    """The name that a request's prompt gets on disk."""

    name: str
    salt: str
    """Digest of the prompt's salt; empty: it has none."""


class Prefix(Struct):
    """A named prefix."""

    name: str
    created: float
    """Seconds since 1970."""
    num_tokens: int
    num_bytes: int
    """Bytes of its blocks, of each rank."""
    is_complete: bool
    """The tier has all of its blocks."""
    salt: str
    """Digest of its salt; empty: it has none."""


class Prefixes(Struct):
    """The named prefixes of an engine."""

    prefixes: list[Prefix]
    num_bytes: int
    """Bytes of their blocks, of each rank. Blocks that several names need count once."""
    most_bytes: int


class Saved(Struct):
    """How far a prompt is on its way to a name. waits: ask again. unknown: no request of this
    engine had the name."""

    state: Literal["saved", "waits", "refused", "unknown"]
    reason: str = ""
    prefix: Prefix | None = None


class OnDisk(Struct):
    """Where the blocks of a named prefix are, or will be."""

    folder: str
    identity: bytes
    num_ranks: int
    keys: list[tuple[int, bytes]]


class Drop(Struct):
    """Which named prefixes are dropped: the one with a name, those with a salt, or all."""

    name: str | None = None
    salt: str | None = None
    """Digest of a salt."""


def context_of(name: str, salt: str | None) -> dict[str, str]:
    """What the context of a request has whose prompt gets a name."""
    return {SAVE: msgspec.json.encode(Save(name, digest_of(salt))).decode()}


def digest_of(salt: str | None) -> str:
    """Digest of a salt, which is not kept itself; empty for none."""
    return "" if salt is None else hashlib.sha256(salt.encode()).hexdigest()[:32]
