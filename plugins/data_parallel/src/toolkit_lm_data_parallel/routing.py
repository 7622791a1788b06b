"""Which engine a request goes to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

WORTH = 4
"""One cached token outweighs this many tokens in flight: it is not computed, while those in flight
are mostly computed already."""


class Choice(NamedTuple):
    """One engine, for one request."""

    num_tokens: int
    """In flight: of the prompts and outputs so far of its requests that have not ended."""
    num_cached: int
    """Tokens of the request's prompt that it should have in its prefix cache."""


def choose(choices: Sequence[Choice]) -> int:
    """The index of the engine that gets a request: the one that has its prefix, unless that is much
    fuller; else the least full.

    It is never fuller than the least full one by more than `WORTH` tokens for each cached one.
    """

    def cost(index: int) -> tuple[int, int, int]:
        num_tokens, num_cached = choices[index]
        return num_tokens - WORTH * num_cached, num_tokens, index

    return min(range(len(choices)), key=cost)


class PrefixMirror:
    """The beginnings of the prompts that an engine was sent, as hashes of their blocks. It forgets
    what was sent longest ago."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def num_cached(self, hashes: Sequence[bytes]) -> int:
        """How many of a prompt's first blocks it was sent."""
        return next(
            (index for index, digest in enumerate(hashes) if digest not in self._blocks),
            len(hashes),
        )

    def add(self, hashes: Sequence[bytes]) -> None:
        """It is sent a prompt of these blocks."""
        # The last goes first: without those before it, it is of no use.
        for digest in reversed(hashes[: self.max_blocks]):
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self.max_blocks:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()
