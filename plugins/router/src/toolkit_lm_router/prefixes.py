"""The index of prefixes: which backends have had, or hold, the beginning of a prompt."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

CHUNK = 512
"""Bytes of a prompt that share a digest: about 128 tokens."""
_FINE = 128
"""Bytes of each chunk of the first CHUNK bytes: short prompts are told apart, too."""
_NUM_FINE = CHUNK // _FINE
_MOST_CHUNKS = 512
"""Most chunks of a prompt that count."""
ENTRY_BYTES = 256
"""Bytes of memory for a chunk that one backend has had: its digest, and its places in two
dictionaries."""
TOLD_BYTES = 512
"""The same, where the backend tells in which block of its cache the chunk is."""


def num_bytes(num_chunks: int) -> int:
    """Bytes of a prompt that its first chunks have."""
    return _FINE * num_chunks if num_chunks <= _NUM_FINE else CHUNK * (num_chunks - _NUM_FINE + 1)


class Hasher:
    """Digests of a prompt's beginnings. With a key that is drawn, nobody outside of the process can
    make two that are the same."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = os.urandom(16) if key is None else key

    def digest(self, value: bytes) -> int:
        """The digest of a whole value."""
        state = blake2b(value, key=self._key, digest_size=8)
        return int.from_bytes(state.digest(), "little")

    def digests(self, parts: Iterable[bytes], head: bytes = b"") -> list[int]:
        """One digest for each whole chunk of the prompt, of all bytes up to the chunk's end.
        `parts`: the prompt, piece by piece. `head`: what comes before the first chunk."""
        made: list[int] = []
        state = blake2b(head, key=self._key, digest_size=8)
        room = _FINE
        for part in parts:
            start = 0
            while len(part) - start >= room:
                state.update(part[start : start + room])
                made.append(int.from_bytes(state.digest(), "little"))
                if len(made) == _MOST_CHUNKS:
                    return made
                start += room
                room = _FINE if len(made) < _NUM_FINE else CHUNK
            state.update(part[start:])
            room -= len(part) - start
        return made


class Block(NamedTuple):
    """A block of a backend's cache."""

    source: int
    """Number of the engine among the backend's."""
    group: int
    """Number of the KV group."""
    hash: int


@dataclass(slots=True)
class _Had:
    """What one backend has had, or has told of."""

    used: OrderedDict[int, bool] = field(default_factory=OrderedDict)
    """Digests, the one used longest ago first. True: the router has sent the chunk."""
    digests: dict[Block, set[int]] = field(default_factory=dict)
    """Digests of the chunks that end in a block."""
    blocks: dict[int, dict[tuple[int, int], Block]] = field(default_factory=dict)
    """The blocks in which a digest's chunk ends, by source and group."""


class PrefixIndex:
    """The chunks of prompts that each backend was sent, those that were used longest ago left out
    where there are too many. Backends have small numbers. What a backend tells of its cache adds
    chunks, and takes others away.

    A digest's backends are the bits of an integer: one walk over a prompt's digests finds the
    depth of each backend, however many there are.
    """

    def __init__(self, max_bytes: int, *, is_told: bool = False) -> None:
        """`max_bytes`: memory for one backend. `is_told`: backends tell of their caches."""
        self._most = max_bytes // (TOLD_BYTES if is_told else ENTRY_BYTES)
        self._backends: dict[int, int] = {}
        """The backends of each digest, as bits."""
        self._had: dict[int, _Had] = {}

    def __len__(self) -> int:
        """Number of pairs of a digest and a backend."""
        return sum(len(had.used) for had in self._had.values())

    def add(self, backend: int, digests: Sequence[int]) -> None:
        """A backend is sent a prompt."""
        had = self._had.setdefault(backend, _Had())
        # The first is used last: later ones are of no use without it.
        for digest in reversed(digests[: self._most]):
            self._use(had, backend, digest, is_sent=True)
        self._bound(had, backend)

    def stored(self, backend: int, chunks: Sequence[tuple[int, Block]]) -> None:
        """A backend tells in which blocks the first chunks of a prompt end."""
        had = self._had.setdefault(backend, _Had())
        for digest, block in reversed(chunks[: self._most]):
            self._use(had, backend, digest, is_sent=False)
            blocks = had.blocks.setdefault(digest, {})
            if (before := blocks.get(block[:2])) is not None:
                _unlink(had.digests, before, digest)
            blocks[block[:2]] = block
            had.digests.setdefault(block, set()).add(digest)
        self._bound(had, backend)

    def removed(self, backend: int, block: Block) -> None:
        """A backend tells that a block is gone. Its chunks count no more, unless another of its
        engines has them."""
        if (had := self._had.get(backend)) is None:
            return
        for digest in had.digests.pop(block, ()):
            blocks = had.blocks[digest]
            del blocks[block[:2]]
            if not blocks:
                del had.blocks[digest]
                del had.used[digest]
                self._drop(digest, 1 << backend)

    def doubt(self, backend: int) -> None:
        """Something that a backend told was missed: only what it was sent counts."""
        if (had := self._had.get(backend)) is None:
            return
        for digest in [digest for digest, is_sent in had.used.items() if not is_sent]:
            self._forget(had, digest)
            self._drop(digest, 1 << backend)

    def clear(self, backend: int) -> None:
        """A backend has lost its cache."""
        if (had := self._had.pop(backend, None)) is not None:
            for digest in had.used:
                self._drop(digest, 1 << backend)

    def matches(self, digests: Sequence[int], allowed: int) -> list[tuple[int, int]]:
        """(number of chunks, backends as bits) that have had a prefix of the prompt, the longest
        prefix first. Each backend is in one pair. `allowed`: the backends that count, as bits."""
        found: list[tuple[int, int]] = []
        before = allowed
        depth = 0
        for depth, digest in enumerate(digests):
            now = before & self._backends.get(digest, 0)
            if now != before and depth:
                found.append((depth, before & ~now))
            before = now
            if not now:
                break
        else:
            depth = len(digests)
        if before and depth:
            found.append((depth, before))
        return found[::-1]

    def _use(self, had: _Had, backend: int, digest: int, *, is_sent: bool) -> None:
        if digest in had.used:
            had.used.move_to_end(digest)
            had.used[digest] |= is_sent
        else:
            had.used[digest] = is_sent
            self._backends[digest] = self._backends.get(digest, 0) | 1 << backend

    def _bound(self, had: _Had, backend: int) -> None:
        while len(had.used) > self._most:
            digest = next(iter(had.used))
            self._forget(had, digest)
            self._drop(digest, 1 << backend)

    @staticmethod
    def _forget(had: _Had, digest: int) -> None:
        del had.used[digest]
        for block in had.blocks.pop(digest, {}).values():
            _unlink(had.digests, block, digest)

    def _drop(self, digest: int, bit: int) -> None:
        left = self._backends[digest] & ~bit
        if left:
            self._backends[digest] = left
        else:
            del self._backends[digest]


def _unlink(digests: dict[Block, set[int]], block: Block, digest: int) -> None:
    """Takes a digest away from a block."""
    digests[block].discard(digest)
    if not digests[block]:
        del digests[block]


def bits(mask: int, fits: Callable[[int], bool]) -> list[int]:
    """The numbers of the set bits that fit."""
    found = []
    while mask:
        low = mask & -mask
        number = low.bit_length() - 1
        if fits(number):
            found.append(number)
        mask ^= low
    return found
