"""The index of prefixes: which backends have had the beginning of a prompt."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

CHUNK = 512
"""Bytes of a prompt that share a digest: about 128 tokens."""
_MOST_CHUNKS = 512
"""Most chunks of a prompt that count."""
ENTRY_BYTES = 256
"""Bytes of memory for a chunk that one backend has had: its digest, and its places in two
dictionaries."""


class Hasher:
    """Digests of a prompt's beginnings. Nobody outside of the process can make two that are the
    same."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = os.urandom(16) if key is None else key

    def digest(self, value: bytes) -> int:
        """The digest of a whole value."""
        state = blake2b(value, key=self._key, digest_size=8)
        return int.from_bytes(state.digest(), "little")

    def digests(self, parts: Iterable[bytes]) -> list[int]:
        """One digest for each whole chunk of the prompt, of all bytes up to the chunk's end.
        `parts`: the prompt, piece by piece."""
        made: list[int] = []
        state = blake2b(key=self._key, digest_size=8)
        room = CHUNK
        for part in parts:
            start = 0
            while len(part) - start >= room:
                state.update(part[start : start + room])
                made.append(int.from_bytes(state.digest(), "little"))
                if len(made) == _MOST_CHUNKS:
                    return made
                start += room
                room = CHUNK
            state.update(part[start:])
            room -= len(part) - start
        return made


class PrefixIndex:
    """The chunks of prompts that each backend was sent, those that were used longest ago left out
    where there are too many. Backends have small numbers.

    A digest's backends are the bits of an integer: one walk over a prompt's digests finds the
    depth of each backend, however many there are.
    """

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: memory for one backend."""
        self._most = max_bytes // ENTRY_BYTES
        self._backends: dict[int, int] = {}
        """The backends of each digest, as bits."""
        self._used: dict[int, OrderedDict[int, None]] = {}
        """The digests of each backend, the one used longest ago first."""

    def __len__(self) -> int:
        """Number of pairs of a digest and a backend."""
        return sum(map(len, self._used.values()))

    def add(self, backend: int, digests: Sequence[int]) -> None:
        """A backend is sent a prompt."""
        used = self._used.setdefault(backend, OrderedDict())
        bit = 1 << backend
        # The first is used last: later ones are of no use without it.
        for digest in reversed(digests[: self._most]):
            if digest in used:
                used.move_to_end(digest)
            else:
                used[digest] = None
                self._backends[digest] = self._backends.get(digest, 0) | bit
        while len(used) > self._most:
            self._drop(used.popitem(last=False)[0], bit)

    def clear(self, backend: int) -> None:
        """A backend has lost its cache."""
        for digest in self._used.pop(backend, ()):
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

    def _drop(self, digest: int, bit: int) -> None:
        left = self._backends[digest] & ~bit
        if left:
            self._backends[digest] = left
        else:
            del self._backends[digest]


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
