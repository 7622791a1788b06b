"""The block tables of one KV group: how they grow, are shared and shrink; and the pools that they
take blocks from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

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


class BlockPool:
    """Block ids 0 .. num_blocks - 1. A block is free (count 0) or owned by as many tables as its
    count says.

    A block may have a key that says what it holds. It keeps it when it is freed, until it is taken
    for something else: those without a key go first, then the least recently used.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.on_evicted: Callable[[Any, int], None] | None = None
        """Told of the key and the block, when a block that is free is taken for something else."""
        self.reset()

    def reset(self) -> None:
        """All blocks are free, and nobody knows what they hold."""
        self.ref_counts = [0] * self.num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))
        """The next to be taken first."""
        self._blocks: dict[Hashable, int] = {}
        """By key."""
        self._keys: dict[int, Hashable] = {}
        """By block."""
        self.num_cached = 0
        """Free blocks whose contents can be found."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def take(self) -> int:
        """A free block, now with one owner. There must be one. What it held is forgotten."""
        block, _ = self._free.popitem(last=False)
        assert self.ref_counts[block] == 0, (
            f"free block {block} has {self.ref_counts[block]} owners"
        )
        if (key := self.forget(block)) is not None and self.on_evicted is not None:
            self.on_evicted(key, block)
        self.ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more owner of an owned block, or the first of a free one whose contents are
        wanted."""
        if self.ref_counts[block] == 0:
            assert block in self._keys, f"block {block} is free, and nobody knows what it holds"
            del self._free[block]
            self.num_cached -= 1
        self.ref_counts[block] += 1

    def release(self, block: int) -> None:
        """One owner less; the last one frees the block."""
        assert self.ref_counts[block] > 0, f"block {block} is freed twice"
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self._free[block] = None
            if block in self._keys:
                self.num_cached += 1
            else:
                self._free.move_to_end(block, last=False)

    # Contents

    def find(self, key: Hashable) -> int | None:
        """The block that holds what `key` says."""
        return self._blocks.get(key)

    def publish(self, key: Hashable, block: int) -> None:
        """Says what an owned block holds. Of two that hold the same, the first is found."""
        assert self.ref_counts[block] > 0, f"block {block} is free"
        if key not in self._blocks and block not in self._keys:
            self._blocks[key] = block
            self._keys[block] = key

    def forget(self, block: int) -> Hashable | None:
        """Its contents are found no more. Returns their key; None: nobody knew what it holds."""
        if (key := self._keys.pop(block, None)) is not None:
            del self._blocks[key]
            self.num_cached -= self.ref_counts[block] == 0
        return key

    def forget_all(self) -> None:
        """Nobody will find what any block holds now."""
        self._blocks.clear()
        self._keys.clear()
        self.num_cached = 0


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
        self.later = -(-spec.lag // spec.block_size)
        """Full blocks of tokens after a block on which the block depends too."""
        self.beyond = spec.block_size if spec.lag % spec.block_size else 0
        """Tokens after a cached prefix that must be those of whoever cached it."""
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
        held = start - self.lag if start > self.lag else 0
        for index in range(held // self.size, min(last, len(table))):
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
        new = []
        while len(table) < last:
            new.append(block := self.pool.take())
            table.append(block)
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

    def names(self, block_hashes: BlockHashes, num_blocks: int) -> Sequence[bytes]:
        """Of a sequence's first blocks, the hashes of all that is in them: what trails depends on
        `lag` tokens more than those of the block."""
        return block_hashes(self.size, num_blocks + self.later)[self.later :]

    # Prefix caching

    def prefix(self, num_tokens: int) -> tuple[int, int]:
        """The first block of a cached prefix that is needed, and the end."""
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
        hashes = self.names(block_hashes, last)
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
        hashes = self.names(block_hashes, last)
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
        first = max(0, before // self.size - self.later)
        full = num_tokens // self.size - self.later
        if full > first:
            hashes = block_hashes(self.size, full + self.later)
            for index in range(first, full):
                if isinstance(block := table[index], int):
                    self.pool.publish((self.index, hashes[index + self.later]), block)

    def forget_contents(self, table: Sequence[Entry]) -> None:
        """Nobody is to find a table's blocks."""
        for block in table:
            if isinstance(block, int):
                self.pool.forget(block)
