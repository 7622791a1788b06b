"""GroupBlocks: the block tables of one KV group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from toolkit_lm.attention import KVCacheSpec
from toolkit_lm.scheduler.block_pool import BlockPool

BlockHashes = Callable[[int, int], Sequence[bytes]]
"""(block size, number of blocks) -> at least so many hashes of a sequence's first blocks."""

NO_BLOCK = -1
"""A table's entry for tokens that a window has left behind. Entries below it are blocks of the host pool."""

FIRST_ON_HOST = NO_BLOCK - 1


class GroupBlocks:
    """How the block tables of one KV group grow, are shared and shrink, as the group's spec says.

    A table is a list of block ids of the device pool, NO_BLOCK, or FIRST_ON_HOST - (block id of the host pool).
    """

    def __init__(self, index: int, spec: KVCacheSpec, pool_index: int, pool: BlockPool, host_pool: BlockPool) -> None:
        self.index = index
        self.spec = spec
        self.pool_index = pool_index
        self.pool = pool
        self.host_pool = host_pool

    def num_needed(self, table: Sequence[int], start: int, end: int, spare: dict[int, int]) -> int:
        """Free blocks that `extend` takes: new ones, and copies of shared ones.

        `spare`: by shared block, its owners but for one. Of its writers each takes a copy, but for the one that is left as its only owner.
        """
        needed = max(0, self.spec.num_blocks(end) - len(table))
        written = self.spec.written(start, end)
        for block in table[written.start : written.stop]:
            if spare.setdefault(block, self._owners(block) - 1) > 0:
                spare[block] -= 1
                needed += 1
        return needed

    def extend(self, table: list[int], start: int, end: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Makes the blocks of tokens [start, end) exist and be the table's own. `num_needed` blocks must be free.

        Returns the new ones, and (index, shared block) of those that are copied.
        """
        copied = []
        written = self.spec.written(start, end)
        for index in range(written.start, min(written.stop, len(table))):
            source = table[index]
            if self.pool.ref_counts[source] == 1:
                # A fork whose parent is gone may find its block full already, of tokens that are the parent's.
                self.pool.forget(source)
            else:
                table[index] = self.pool.take()
                self.pool.release(source)
                copied.append((index, source))
        new = [self.pool.take() for _ in range(self.spec.num_blocks(end) - len(table))]
        table += new
        return new, copied

    def trim(self, table: list[int], num_computed_tokens: int) -> None:
        """Gives back the blocks that no token from `num_computed_tokens` on can see."""
        # The last of them first: as soon as one is gone, all before it are.
        for index in range(min(len(table), self.spec.first_needed(num_computed_tokens)) - 1, -1, -1):
            if table[index] == NO_BLOCK:
                break
            self.pool.release(table[index])
            table[index] = NO_BLOCK

    def fork(self, table: Sequence[int], num_tokens: int) -> list[int]:
        """A table that shares the blocks of the first `num_tokens` tokens."""
        shared = list(table[: self.spec.num_blocks(num_tokens)])
        for entry in shared:
            if entry >= 0:
                self.pool.share(entry)
            elif entry <= FIRST_ON_HOST:
                self.host_pool.share(FIRST_ON_HOST - entry)
        return shared

    def release(self, table: Sequence[int]) -> None:
        """Gives back all blocks of a table."""
        # From the end, so that a sequence's first blocks, the likeliest to be wanted again, are reused last.
        for entry in reversed(table):
            if entry >= 0:
                self.pool.release(entry)
            elif entry <= FIRST_ON_HOST:
                self.host_pool.release(FIRST_ON_HOST - entry)

    def _owners(self, entry: int) -> int:
        return self.pool.ref_counts[entry] if entry >= 0 else self.host_pool.ref_counts[FIRST_ON_HOST - entry]

    # Prefix caching

    def gap(self, block_hashes: BlockHashes, length: int) -> int | None:
        """Where the first block begins that the token after `length` can see and that is not cached. No prefix may end behind it."""
        size = self.spec.block_size
        first, last = self.spec.first_needed(length), length // size
        hashes = block_hashes(size, last)
        return next((i * size for i in range(first, last) if self.pool.find((self.index, hashes[i])) is None), None)

    def cached(self, block_hashes: BlockHashes, num_tokens: int) -> Iterator[tuple[int, int]]:
        """(index in the table, block) of a cached prefix."""
        last = num_tokens // self.spec.block_size
        hashes = block_hashes(self.spec.block_size, last)
        for index in range(self.spec.first_needed(num_tokens), last):
            block = self.pool.find((self.index, hashes[index]))
            assert block is not None, "the prefix is not cached"
            yield index, block

    def adopt(self, block_hashes: BlockHashes, num_tokens: int) -> list[int]:
        """A table with the blocks of a cached prefix."""
        table = [NO_BLOCK] * (num_tokens // self.spec.block_size)
        for index, block in self.cached(block_hashes, num_tokens):
            self.pool.share(block)
            table[index] = block
        return table

    def publish(self, table: Sequence[int], block_hashes: BlockHashes, before: int, num_tokens: int) -> None:
        """Lets others find the full blocks of tokens [before, num_tokens)."""
        first, full = before // self.spec.block_size, num_tokens // self.spec.block_size
        if full > first:
            hashes = block_hashes(self.spec.block_size, full)
            for index in range(first, full):
                if table[index] >= 0:
                    self.pool.publish((self.index, hashes[index]), table[index])

    def forget_contents(self, table: Sequence[int]) -> None:
        """Nobody is to find a table's blocks."""
        for block in table:
            if block >= 0:
                self.pool.forget(block)
