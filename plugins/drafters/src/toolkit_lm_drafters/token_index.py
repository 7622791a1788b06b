"""TokenIndex: where the last tokens of a sequence occurred before."""

from __future__ import annotations

from collections.abc import Iterator
from operator import mul

import numpy as np

_FACTORS = np.random.default_rng(20).integers(2**63, size=64, dtype=np.uint64) * 2 + 1
"""Odd factors of a gram's tokens. The hash is the top bits of the sum of products modulo 2**64."""
_MASK = 2**64 - 1
_FEW = 32
"""Number of new tokens from which numpy is faster than a loop."""


class TokenIndex:
    """Index of all grams of `size` tokens in a sequence that grows: a hash table of the latest
    occurrence, and for each occurrence the one before, as in LZ77.

    It takes 8 to 16 bytes per token. A new token and a look-up take a time that does not depend on
    the length of the sequence. The index does not hold the tokens.
    """

    def __init__(self, size: int, capacity: int = 0) -> None:
        """`size`: tokens of a gram, at most 64. `capacity`: number of tokens to make room for."""
        self.size = size
        self._factors = _FACTORS[:size]
        self._multipliers = self._factors.tolist()
        self._allocate(capacity)

    def _allocate(self, capacity: int) -> None:
        bits = max(6, (max(capacity, 1) - 1).bit_length())
        self._shift = 64 - bits
        self._heads = np.zeros(2**bits, np.int32)
        self._before = np.zeros(2**bits, np.int32)
        # An element of a memoryview is read faster than one of an array.
        self._head = self._heads.data
        self._previous = self._before.data
        self._end = self.size
        """End of the next gram to add. Grams of the sequence have ends of at least `size`."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the index takes."""
        return self._heads.nbytes + self._before.nbytes

    def update(self, tokens: np.ndarray) -> None:
        """Adds the grams of tokens [N] int32 that have a token after them. Earlier tokens must be
        those of earlier calls."""
        if len(tokens) > len(self._before):
            self._allocate(len(tokens))
        end = len(tokens)
        if end - self._end > _FEW:
            self._add_many(tokens)
        else:
            view = tokens.data
            for place in range(self._end, end):
                key = self._key(view, place)
                self._previous[place] = self._head[key]
                self._head[key] = place
        self._end = max(self._end, end)

    def _add_many(self, tokens: np.ndarray) -> None:
        first = self._end - self.size
        keys = np.zeros(len(tokens) - self._end, np.uint64)
        for offset, factor in enumerate(self._factors):
            start = first + offset
            keys += tokens[start : start + len(keys)].astype(np.uint64) * factor
        keys >>= np.uint64(self._shift)
        order = keys.argsort(kind="stable")
        ends = (order + self._end).astype(np.int32)
        keys = keys[order]
        changes = np.flatnonzero(keys[1:] != keys[:-1]) + 1
        firsts = np.concatenate(([0], changes))
        lasts = np.concatenate((changes - 1, [len(keys) - 1]))
        self._before[ends[1:]] = ends[:-1]
        self._before[ends[firsts]] = self._heads[keys[firsts]]
        self._heads[keys[lasts]] = ends[lasts]

    def occurrences(
        self, tokens: memoryview, end: int, limit: int, held: memoryview | None = None
    ) -> Iterator[int]:
        """Yields the ends of grams that equal the last `size` of tokens[:end], the latest first, of
        the `limit` latest with the same hash. `held`: the index's sequence; None: it is
        `tokens`."""
        held = tokens if held is None else held
        if end < self.size:
            return
        gram = tokens[end - self.size : end]
        place = self._head[self._key(tokens, end)]
        for _ in range(limit):
            if not place:
                return
            if held[place - self.size : place] == gram:
                yield place
            place = self._previous[place]

    def _key(self, tokens: memoryview, end: int) -> int:
        total: int = sum(map(mul, tokens[end - self.size : end], self._multipliers))
        return (total & _MASK) >> self._shift


def common_suffix(tokens: memoryview, end: int, other: memoryview, last: int, most: int) -> int:
    """Number of equal tokens, at most `most`, at the ends of tokens[:end] and other[:last]."""
    most = min(most, end, last)
    length = 0
    while length < most and tokens[end - length - 1] == other[last - length - 1]:
        length += 1
    return length
