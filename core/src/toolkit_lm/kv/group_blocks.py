"""The block tables of one KV group: how they grow, are shared and shrink."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from toolkit_lm.kv.block_pool import BlockPool
from toolkit_lm.kv.spec import KVCacheSpec

BlockHashes = Callable[[int, int], Sequence[bytes]]
"""(block size, number of blocks) -> at least so many hashes of a sequence's first blocks."""

Find = Callable[[int, Sequence[bytes]], int]
"""(group, digests of blocks) -> how many of these, up to the first that is not, are elsewhere."""


class Location(NamedTuple):
    """Where a block is that is not on the device."""

    tier: str
    """Name of the tier that keeps it."""
    id: int
    """Its place there."""


HOST = "host"
"""The tier that preempted requests are swapped to."""

Entry = int | Location | None
"""Of a block table: a block of the device, or where it is else. None: a window has left its tokens
behind."""
Table = list[Entry]


class TokenRange(NamedTuple):
    """Tokens [start, end) of a sequence that a step is about to write."""

    seq_id: int
    start: int
    end: int


class GroupBlocks:
    """How the block tables of one KV group grow, are shared and shrink, as the group's spec
    says."""

    def __init__(
        self, index: int, spec: KVCacheSpec, pool_index: int, pool: BlockPool, host_pool: BlockPool
    ) -> None:
        self.index = index
        self.spec = spec
        self.size = spec.block_size
        self.lag = spec.lag
        self.pool_index = pool_index
        self.pool = pool
        self.host_pool = host_pool

    def num_needed(
        self, table: Sequence[Entry], start: int, end: int, spare: dict[Entry, int]
    ) -> int:
        """Free blocks that `extend` takes: new ones, and copies of shared ones.

        `spare`: by shared block, its owners but for one. Of its writers each takes a copy, but for
        the one that is left as its only owner.
        """
        last = -(-(end + self.spec.lookahead) // self.size)
        needed = max(0, last - len(table))
        for block in table[self._held(start) // self.size : last]:
            if spare.setdefault(block, self._owners(block) - 1) > 0:
                spare[block] -= 1
                needed += 1
        return needed

    def extend(
        self, table: Table, start: int, end: int
    ) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Makes the blocks of tokens [start, end), and of the look-ahead after them, exist and be
        the table's own, with those of the tokens before that it has not written yet. `num_needed`
        blocks must be free.

        Returns the new ones, and (index, shared block, its copy) of those that are copied.
        """
        copied = []
        last = -(-(end + self.spec.lookahead) // self.size)
        for index in range(self._held(start) // self.size, min(last, len(table))):
            source = table[index]
            assert isinstance(source, int), "a block that is written is on the device"
            if self.pool.ref_counts[source] == 1:
                # A fork whose parent is gone may find its block full already, of tokens that are
                # the parent's.
                self.pool.forget(source)
            else:
                table[index] = copy = self.pool.take()
                self.pool.release(source)
                copied.append((index, source, copy))
        new = [self.pool.take() for _ in range(last - len(table))]
        table += new
        return new, copied

    def trim(self, table: Table, num_computed_tokens: int) -> None:
        """Gives back the blocks that no token from `num_computed_tokens` on can see."""
        # The last of them first: as soon as one is gone, all before it are.
        for index in range(
            min(len(table), self.spec.first_needed(self._held(num_computed_tokens))) - 1, -1, -1
        ):
            if table[index] is None:
                break
            self.release([table[index]])
            table[index] = None

    def fork(self, table: Sequence[Entry], num_tokens: int) -> Table:
        """A table that shares the blocks of the first `num_tokens` tokens."""
        shared = list(table[: -(-num_tokens // self.size)])
        for entry in shared:
            if isinstance(entry, int):
                self.pool.share(entry)
            elif entry is not None:
                self.host_pool.share(entry.id)
        return shared

    def release(self, table: Sequence[Entry]) -> None:
        """Gives back all blocks of a table."""
        # From the end, so that a sequence's first blocks, the likeliest to be wanted again, are
        # reused last.
        for entry in reversed(table):
            if isinstance(entry, int):
                self.pool.release(entry)
            elif entry is not None:
                self.host_pool.release(entry.id)

    def _owners(self, entry: Entry) -> int:
        assert entry is not None, "what a window has left behind has no owner"
        return (
            self.pool.ref_counts[entry]
            if isinstance(entry, int)
            else self.host_pool.ref_counts[entry.id]
        )

    def _held(self, num_tokens: int) -> int:
        """Of so many computed tokens, how many are written."""
        return max(0, num_tokens - self.lag)

    # Prefix caching

    def prefix(self, num_tokens: int) -> tuple[int, int]:
        """The first block of a cached prefix that is needed, and the end. What trails writes the
        last tokens of it again: they may depend on what comes after the prefix."""
        held = self._held(num_tokens)
        return self.spec.first_needed(held), -(-held // self.size)

    def whole(self, num_tokens: int) -> int:
        """Blocks of a cached prefix that are not written again."""
        return self._held(num_tokens) // self.size

    def gap(
        self, block_hashes: BlockHashes, length: int, elsewhere: Find | None = None
    ) -> int | None:
        """Where the first block begins that the token after `length` can see and that is not
        cached, nor `elsewhere`. No prefix may end behind it."""
        first, last = self.prefix(length)
        hashes = block_hashes(self.size, last)
        missing = (i for i in range(first, last) if self.pool.find((self.index, hashes[i])) is None)
        if elsewhere is not None:
            indices = list(missing)
            found = elsewhere(self.index, [hashes[i] for i in indices]) if indices else 0
            missing = (i for i in indices[found:])
        index = next(missing, None)
        return None if index is None else index * self.size

    def cached(self, block_hashes: BlockHashes, num_tokens: int) -> Iterator[tuple[int, int]]:
        """(index in the table, block) of a cached prefix."""
        first, last = self.prefix(num_tokens)
        hashes = block_hashes(self.size, last)
        for index in range(first, last):
            block = self.pool.find((self.index, hashes[index]))
            assert block is not None, "the prefix is not cached"
            yield index, block

    def adopt(self, block_hashes: BlockHashes, num_tokens: int) -> Table:
        """A table with the blocks of a cached prefix."""
        table: Table = [None] * self.prefix(num_tokens)[1]
        for index, block in self.cached(block_hashes, num_tokens):
            self.pool.share(block)
            table[index] = block
        return table

    def publish(
        self, table: Sequence[Entry], block_hashes: BlockHashes, before: int, num_tokens: int
    ) -> None:
        """Lets others find the full blocks of tokens [before, num_tokens)."""
        first = self._held(before) // self.size
        full = self._held(num_tokens) // self.size
        if full > first:
            hashes = block_hashes(self.size, full)
            for index in range(first, full):
                if isinstance(block := table[index], int):
                    self.pool.publish((self.index, hashes[index]), block)

    def forget_contents(self, table: Sequence[Entry]) -> None:
        """Nobody is to find a table's blocks."""
        for block in table:
            if isinstance(block, int):
                self.pool.forget(block)
