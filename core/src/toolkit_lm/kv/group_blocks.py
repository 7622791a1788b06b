"""GroupBlocks: allocates and shares the block tables of one KV group. BlockPool: the pool that
supplies their blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from toolkit_lm.kv.spec import KVCacheSpec

BlockHashes = Callable[[int, int], Sequence[bytes]]
"""Function (block size, number of blocks) that returns at least that many hashes of a sequence's
first blocks."""

Find = Callable[[int, Sequence[bytes]], int]
"""Function (group, block digests) that counts the leading digests which another place holds."""


class Location(NamedTuple):
    """Location of a block that is not on the device."""

    tier: str
    """Name of the tier that holds the block."""
    id: int
    """Index of the block in its tier."""


HOST = "host"
"""Name of the tier that preempted requests are swapped to."""

Entry = int | Location | None
"""Entry of a block table: a block id of the device, or the block's location elsewhere. None: the
tokens have left the window."""
Table = list[Entry]


class TokenRange(NamedTuple):
    """Tokens [start, end) of a sequence that a step is about to write."""

    seq_id: int
    start: int
    end: int


class FreeBlocks(OrderedDict[int, int]):
    """Free blocks of a pool, in the order in which they are allocated, and their contents evicted:
    those without contents first, then the least recently used. A subclass may have another order,
    and a value for each block: `BlockPool.order_by`."""

    def add(self, block: int, key: Hashable | None) -> None:
        """A block is free from now on. `key`: of its contents; None: nobody finds them."""
        self[block] = 0
        if key is None:
            self.move_to_end(block, last=False)

    def remove(self, block: int) -> None:
        """A free block is shared, or its contents are forgotten."""
        del self[block]

    def pop_next(self) -> int:
        """Removes the block that is allocated next, and returns it."""
        return self.popitem(last=False)[0]


class BlockPool:
    """Blocks with ids 0 .. num_blocks - 1. The reference count of a block is the number of tables
    that own it; at 0 the block is free.

    A block may have a key that identifies its contents. A freed block keeps its key until it is
    allocated again. `FreeBlocks` says which one is allocated first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.on_evicted: Callable[[Any, int], None] | None = None
        """Called with the key and the block when a free block with contents is allocated for
        something else."""
        self.on_forgotten: Callable[[Any], object] | None = None
        """Called with each key whose contents are no longer found; None: no contents are."""
        self.on_published: Callable[[Any, int], None] | None = None
        """Called with the key and the block when contents can be found from now on."""
        self._free = FreeBlocks()
        self.reset()

    def reset(self) -> None:
        """Frees all blocks, and forgets their contents."""
        self.ref_counts = [0] * self.num_blocks
        self._blocks: dict[Hashable, int] = {}
        """Block ids by key."""
        self._keys: dict[int, Hashable] = {}
        """Keys by block id."""
        self.num_cached = 0
        """Number of free blocks whose contents can be found."""
        self.forget_all()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self) -> int:
        """Allocates a free block, with one owner, and forgets its contents. A block must be
        free."""
        block = self._free.pop_next()
        assert self.ref_counts[block] == 0, (
            f"free block {block} has {self.ref_counts[block]} owners"
        )
        self.ref_counts[block] = 1
        if block in self._keys:
            self.num_cached -= 1
            key = self.forget(block)
            if self.on_evicted is not None:
                self.on_evicted(key, block)
        return block

    def share(self, block: int) -> None:
        """Adds an owner to a block. The block is owned already, or free with contents that are
        wanted."""
        if self.ref_counts[block] == 0:
            assert block in self._keys, f"block {block} is free, and nobody knows what it holds"
            self._free.remove(block)
            self.num_cached -= 1
        self.ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Removes an owner. The last one frees the block."""
        assert self.ref_counts[block] > 0, f"block {block} is freed twice"
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            key = self._keys.get(block)
            self._free.add(block, key)
            if key is not None:
                self.num_cached += 1

    # Contents

    def find(self, key: Hashable) -> int | None:
        """Returns the block with the contents that `key` identifies; None: there is none."""
        return self._blocks.get(key)

    def publish(self, key: Hashable, block: int) -> bool:
        """Sets the key of an owned block. If two blocks have the same key, the first is found.
        Returns whether this one is."""
        assert self.ref_counts[block] > 0, f"block {block} is free"
        if key in self._blocks or block in self._keys:
            return False
        self._blocks[key] = block
        self._keys[block] = key
        if self.on_published is not None:
            self.on_published(key, block)
        return True

    def is_known(self, block: int) -> bool:
        """Whether its contents can be found."""
        return block in self._keys

    def forget(self, block: int) -> Hashable | None:
        """Removes a block's key, so that its contents are no longer found. Returns the key, or
        None."""
        if (key := self._keys.pop(block, None)) is not None:
            del self._blocks[key]
            if self.ref_counts[block] == 0:
                self.num_cached -= 1
                self._free.remove(block)
                self._free.add(block, None)
            if self.on_forgotten is not None:
                self.on_forgotten(key)
        return key

    def forget_all(self) -> None:
        """Removes all keys, so that no contents are found."""
        self._blocks.clear()
        self._keys.clear()
        self.num_cached = 0
        self._refill()
        if self.on_forgotten is not None:
            self.on_forgotten(None)

    def order_by(self, order: FreeBlocks) -> None:
        """Allocates free blocks in another order, from now on. `order` has no blocks."""
        self._free = order
        self._refill()

    def _refill(self) -> None:
        self._free.clear()
        for block in range(self.num_blocks - 1, -1, -1):
            if self.ref_counts[block] == 0:
                self._free.add(block, self._keys.get(block))


class GroupBlocks:
    """Grows, shares and shrinks the block tables of one KV group, as the group's spec requires."""

    def __init__(
        self, index: int, spec: KVCacheSpec, pool_index: int, pool: BlockPool, host_pool: BlockPool
    ) -> None:
        self.index = index
        self.spec = spec
        self.size = spec.block_size
        self.unit = spec.snapshots or spec.block_size
        """A cached prefix ends at a multiple of so many tokens."""
        self.lag = spec.lag
        self.later = -(-spec.lag // spec.block_size)
        """Number of following blocks on whose tokens a block's contents depend, because of
        `lag`."""
        self.beyond = spec.block_size if spec.lag % spec.block_size else 0
        """Number of tokens after a cached prefix that must equal those of the sequence that cached
        it."""
        self.pool_index = pool_index
        self.pool = pool
        self.host_pool = host_pool

    def num_needed(
        self, table: Sequence[Entry], start: int, end: int, spare: dict[Entry, int]
    ) -> int:
        """Number of free blocks that `extend` takes: new ones, and copies of shared ones.

        `spare`: owners of a shared block beyond the first. Every writer copies it; the last owner
        left writes in place.
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
        """Gives the table blocks of its own for tokens [start, end), for the look-ahead after them,
        and for earlier tokens that are not written yet. `num_needed` blocks must be free.

        Returns the new blocks, and (index, shared block, copy) of each copied one.
        """
        copied = []
        last = -(-(end + self.spec.lookahead) // self.size)
        held = start - self.lag if start > self.lag else 0
        for index in range(held // self.size, min(last, len(table))):
            source = table[index]
            assert isinstance(source, int), "a block that is written is on the device"
            if self.pool.ref_counts[source] == 1:
                # A fork whose parent is gone may find this block full already, with the parent's
                # tokens.
                self.pool.forget(source)
            else:
                table[index] = copy = self.pool.allocate()
                self.pool.release(source)
                copied.append((index, source, copy))
        new = []
        while len(table) < last:
            new.append(block := self.pool.allocate())
            table.append(block)
        return new, copied

    def trim(self, table: Table, num_computed_tokens: int) -> None:
        """Frees the blocks that no token from `num_computed_tokens` on can see."""
        # Backwards: once a freed block is reached, all earlier ones are free.
        for index in range(
            min(len(table), self.spec.first_needed(self._held(num_computed_tokens))) - 1, -1, -1
        ):
            if table[index] is None:
                break
            self.release([table[index]])
            table[index] = None

    def fork(self, table: Sequence[Entry], num_tokens: int) -> Table:
        """Returns a table that shares the blocks of the first `num_tokens` tokens."""
        shared = list(table[: -(-num_tokens // self.size)])
        for entry in shared:
            if isinstance(entry, int):
                self.pool.share(entry)
            elif entry is not None:
                self.host_pool.share(entry.id)
        return shared

    def release(self, table: Sequence[Entry]) -> None:
        """Releases all blocks of a table."""
        # Backwards, so that a sequence's first blocks are reused last: they are the likeliest to be
        # wanted again.
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
        """Number of tokens that are written if `num_tokens` are computed."""
        return max(0, num_tokens - self.lag)

    # Prefix caching

    def prefix(self, num_tokens: int) -> tuple[int, int]:
        """Returns the first block of a cached prefix that is needed, and the end of the prefix in
        blocks."""
        held = self._held(num_tokens)
        return self.spec.first_needed(held), -(-held // self.size)

    def whole(self, num_tokens: int) -> int:
        """Number of blocks of a cached prefix that are not written again."""
        return self._held(num_tokens) // self.size

    def wanted(self, block_hashes: BlockHashes, num_tokens: int) -> list[tuple[int, bytes]]:
        """(index in the table, digest) of each block of a cached prefix. What trails depends on
        `lag` tokens more than those of the block."""
        first, last = self.prefix(num_tokens)
        hashes = block_hashes(self.size, last + self.later)
        return [(index, hashes[index + self.later]) for index in range(first, last)]

    def gap(
        self, block_hashes: BlockHashes, length: int, elsewhere: Find | None = None
    ) -> int | None:
        """Returns the start of the first missing block: one that the token after `length` needs,
        and that is neither cached nor `elsewhere`. No prefix may end after it. None: no block is
        missing."""
        wanted = self.wanted(block_hashes, length)
        missing = (prefix for prefix in wanted if self.pool.find((self.index, prefix[1])) is None)
        if elsewhere is not None:
            not_here = list(missing)
            found = elsewhere(self.index, [digest for _, digest in not_here]) if not_here else 0
            missing = (prefix for prefix in not_here[found:])
        first = next(missing, None)
        return None if first is None else first[0] * self.size

    def cached(self, block_hashes: BlockHashes, num_tokens: int) -> Iterator[tuple[int, int]]:
        """Yields (index in the table, block) of a cached prefix."""
        for index, digest in self.wanted(block_hashes, num_tokens):
            block = self.pool.find((self.index, digest))
            assert block is not None, "the prefix is not cached"
            yield index, block

    def adopt(self, block_hashes: BlockHashes, num_tokens: int) -> Table:
        """Returns a table with the blocks of a cached prefix."""
        table: Table = [None] * self.prefix(num_tokens)[1]
        for index, block in self.cached(block_hashes, num_tokens):
            self.pool.share(block)
            table[index] = block
        return table

    def publish(
        self, table: Sequence[Entry], block_hashes: BlockHashes, before: int, num_tokens: int
    ) -> list[int]:
        """Makes the full blocks of tokens [before, num_tokens) available to others. Returns the
        indices in the table of those that nobody found before."""
        first = max(0, before // self.size - self.later)
        full = num_tokens // self.size - self.later
        new = []
        if full > first:
            hashes = block_hashes(self.size, full + self.later)
            for index in range(first, full):
                if isinstance(block := table[index], int) and self.pool.publish(
                    (self.index, hashes[index + self.later]), block
                ):
                    new.append(index)  # noqa: PERF401 (a comprehension is one call more)
        return new

    def forget_contents(self, table: Sequence[Entry]) -> None:
        """Unpublishes a table's blocks, so that they are no longer found."""
        for block in table:
            if isinstance(block, int):
                self.pool.forget(block)


class SnapshotBlocks(GroupBlocks):
    """A sequence has one block, which each of its steps writes. So nobody else can use that block:
    a cached prefix is a copy of it, taken at a border, when the next step is about to write it.

    Borders are multiples of `spec.snapshots` tokens. A snapshot has the hash of all tokens up to
    its border, and is evicted as other cached blocks are.
    """

    def wanted(self, block_hashes: BlockHashes, num_tokens: int) -> list[tuple[int, bytes]]:
        return [(0, self._digests(block_hashes, num_tokens)[-1])]

    def gap(
        self, block_hashes: BlockHashes, length: int, elsewhere: Find | None = None
    ) -> int | None:
        """The last border before `length` of which there is a snapshot, 0 if none; None: there is
        one at `length`."""
        digests = self._digests(block_hashes, length)
        for index in range(len(digests) - 1, -1, -1):
            digest = digests[index]
            known = self.pool.find((self.index, digest)) is not None
            if known or (elsewhere is not None and elsewhere(self.index, [digest])):
                return None if index == len(digests) - 1 else (index + 1) * self.unit
        return 0 if digests else None

    def publish(
        self, table: Sequence[Entry], block_hashes: BlockHashes, before: int, num_tokens: int
    ) -> list[int]:
        """Nothing: a later step writes the table's block."""
        return []

    def is_kept(self, table: Table, num_tokens: int, num_prompt_tokens: int, border: int) -> bool:
        """Whether the state after `num_tokens` tokens is to be found by others: it is a border's,
        or a snapshot itself."""
        return self.pool.is_known(self.own(table)) or (
            self.stop(num_tokens - 1, num_prompt_tokens, border) == num_tokens
        )

    @staticmethod
    def own(table: Sequence[Entry]) -> int:
        """The table's block, which a step is about to write."""
        [block] = table
        assert isinstance(block, int), "a block that is written is on the device"
        return block

    def stop(self, start: int, num_prompt_tokens: int, border: int) -> int:
        """Result of `KVCacheSpec.stops_at`. Asserts that it is a border within the prompt."""
        stop = self.spec.stops_at(start, num_prompt_tokens, border)
        assert stop == 0 or (start < stop <= num_prompt_tokens and stop % border == 0), (
            f"stops_at({start}, {num_prompt_tokens}, {border}) of {self.spec.kind!r} is {stop}"
        )
        return stop

    def keep(
        self, table: Table, block_hashes: BlockHashes, num_tokens: int, *, room: bool
    ) -> int | None:
        """Before a step writes a table's block, which holds the state after `num_tokens` tokens: a
        new block, that others find from now on, and that is to become a copy of it. None: there is
        another one already, or no `room` for it."""
        block = self.own(table)
        [(_, digest)] = self.wanted(block_hashes, num_tokens)
        found = self.pool.find((self.index, digest))
        if found == block and self.pool.ref_counts[block] == 1:
            self.pool.forget(block)
        elif found is not None:
            return None
        if not room:
            return None
        copy = self.pool.allocate()
        self.pool.publish((self.index, digest), copy)
        return copy

    def forget_snapshots(self, block_hashes: BlockHashes, num_tokens: int) -> None:
        """Forgets all snapshots of a sequence at borders up to `num_tokens` tokens."""
        for digest in self._digests(block_hashes, num_tokens):
            if (block := self.pool.find((self.index, digest))) is not None:
                self.pool.forget(block)

    def _digests(self, block_hashes: BlockHashes, num_tokens: int) -> Sequence[bytes]:
        """Prefix hashes at all borders up to `num_tokens`."""
        count = num_tokens // self.unit
        return block_hashes(self.unit, count)[:count]
