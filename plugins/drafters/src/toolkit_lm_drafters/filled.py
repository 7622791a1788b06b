"""FilledPrefixes: the prefixes of sequences that a draft model has read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_PIECE = 16
"""Tokens of a piece. What is left of a prefix is read again."""
_MOST = 2**16
"""Pieces that are known."""


class FilledPrefixes:
    """Pieces of prefixes whose entries in the drafter's KV cache are there.

    A sequence may begin with a cached prefix of another one, which the draft model may not have
    read. A piece is known by a hash of all tokens up to its end. The hash leaves out what else
    tells cached prefixes apart, such as an adapter: a mistake costs drafts, and changes no token.
    """

    def __init__(self) -> None:
        self._known: dict[int, None] = {}
        """Hashes, the oldest first."""
        self._ends: dict[int, tuple[int, int]] = {}
        """Number of pieces that were added, and the hash of the last, by seq_id."""

    def add(self, seq_id: int, tokens: np.ndarray, end: int) -> None:
        """The entries of a sequence's first `end` tokens are there."""
        count, last = self._ends.get(seq_id, (0, 0))
        if end < (count + 1) * _PIECE:
            return
        for piece in _hashes(tokens[:end], count, last):
            self._known.pop(piece, None)
            self._known[piece] = None
            self._ends[seq_id] = end // _PIECE, piece
        while len(self._known) > _MOST:
            del self._known[next(iter(self._known))]

    def leave(self, tokens: np.ndarray, start: int) -> None:
        """Tokens from `start` on get new blocks, without entries."""
        if self._known:
            for index, piece in enumerate(_hashes(tokens, 0, 0)):
                if index >= start // _PIECE:
                    self._known.pop(piece, None)

    def count(self, tokens: np.ndarray) -> int:
        """Number of the first tokens whose entries are there."""
        found = 0
        for piece in _hashes(tokens, 0, 0) if self._known else ():
            if piece not in self._known:
                break
            found += _PIECE
        return found

    def remove(self, seq_id: int) -> None:
        """Forgets a sequence. Its prefixes stay."""
        self._ends.pop(seq_id, None)


def _hashes(tokens: np.ndarray, first: int, last: int) -> Iterator[int]:
    """Hashes of the whole pieces from the first-th on. `last`: hash of the piece before it."""
    for begin in range(first * _PIECE, len(tokens) - _PIECE + 1, _PIECE):
        last = hash((last, tokens[begin : begin + _PIECE].tobytes()))
        yield last
