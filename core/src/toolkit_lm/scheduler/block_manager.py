"""Block tables: which blocks hold the keys and values of which tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from toolkit_lm.attention import KVCacheSpec
from toolkit_lm.messages import BlockCopy, BlockMove
from toolkit_lm.scheduler.block_pool import BlockPool


class TokenRange(NamedTuple):
    """Tokens [start, end) of a sequence that a step is about to write."""

    seq_id: int
    start: int
    end: int


class TableUpdate(NamedTuple):
    """What changed in a sequence's tables to make room for a write."""

    new_blocks: list[list[int]]
    """Per KV group, the blocks appended."""
    copies: list[BlockCopy]
    moves: list[BlockMove]


BlockHashes = Callable[[int, int], Sequence[bytes]]
"""(block size, number of blocks) -> at least so many hashes of a sequence's first blocks."""

NO_BLOCK = -1
"""A table's entry for tokens that a window has left behind. Entries below it are blocks of the host pool."""

_FIRST_ON_HOST = NO_BLOCK - 1


class BlockManager:
    """One table per (sequence, decoder KV group), and one per (request, cross-attention KV group), over a device pool and a host pool.

    Invariants (`check`):

    - in each pool a block's reference count equals the number of table entries that name it, and free + owned = total;
    - distinct blocks of a request = its cross tables + the union of its sequences' tables;
    - `swap_out` moves, and `free` and `free_cross` release, exactly those of them whose reference count reaches zero: all, when nothing
      is shared with another request;
    - nobody writes a block that has another owner (copy on write).
    """

    def __init__(self, pool: BlockPool, specs: Sequence[KVCacheSpec], host_pool: BlockPool | None = None) -> None:
        """`specs`: of each KV group. Those of kind "cross" belong to requests, the others to sequences."""
        self.pool = pool
        self.host_pool = host_pool or BlockPool(0)
        self.specs = list(specs)
        self._decoder = [(group, spec) for group, spec in enumerate(specs) if spec.kind != "cross"]
        self._cross = [(group, spec) for group, spec in enumerate(specs) if spec.kind == "cross"]
        self.has_tables = bool(self._decoder)
        """Whether sequences cache anything at all: those of an encoder do not."""
        self._gcd = math.gcd(*(spec.block_size for _, spec in self._decoder))
        self._windowed = [(group, spec) for group, spec in self._decoder if spec.window is not None]
        self.has_windows = bool(self._windowed)
        """Whether `trim` can give anything back."""
        self._tables: dict[int, list[list[int]]] = {}
        self._cross_tables: dict[str, list[list[int]]] = {}
        self._published: dict[int, int] = {}
        """By seq_id, tokens whose full blocks can be found by others."""

    # Tables

    def get_block_table(self, seq_id: int, group: int = 0) -> list[int]:
        """The blocks of a sequence, in the order of its tokens, NO_BLOCK where a window has passed; empty for one that holds none."""
        return self._tables[seq_id][group] if seq_id in self._tables else []

    def get_cross_block_table(self, request_id: str, group: int = 0) -> list[int]:
        """The blocks of a request's encoder tokens; empty for one that holds none."""
        return self._cross_tables[request_id][group] if request_id in self._cross_tables else []

    def blocks_needed(self, ranges: Iterable[TokenRange]) -> int:
        """Free blocks that `append_slots` of all `ranges` together takes: new ones, and copies of shared ones."""
        needed = 0
        spare: dict[int, int] = {}
        """By shared block, its owners but for one: of its writers each takes a copy, but for the one that is left as its only owner."""
        for seq_id, start, end in ranges:
            tables = self._tables.get(seq_id)
            for group, spec in self._decoder:
                table, last = tables[group] if tables else [], -(-end // spec.block_size)
                needed += max(0, last - len(table))
                for block in table[start // spec.block_size : last]:
                    if spare.setdefault(block, self._owners(block) - 1) > 0:
                        spare[block] -= 1
                        needed += 1
        return needed

    def fits(self, ranges: Sequence[TokenRange]) -> bool:
        """Whether the blocks that `append_slots` of all `ranges` together takes are free."""
        free, most = self.pool.num_free, 0
        for _, start, end in ranges:
            most += (end - start) + 1
        # N tokens touch at most N + 1 blocks of a group: where so many are free, nobody need count.
        return most * len(self._decoder) <= free or self.blocks_needed(ranges) <= free

    def append_slots(self, tokens: TokenRange) -> TableUpdate:
        """Makes the slots of `tokens` exist and be the sequence's own. `blocks_needed` must be free."""
        seq_id, start, end = tokens
        tables = self._tables.setdefault(seq_id, [[] for _ in self.specs])
        update = TableUpdate([[] for _ in self.specs], [], [])
        for group, spec in self._decoder:
            table, last = tables[group], -(-end // spec.block_size)
            for index in range(start // spec.block_size, min(last, len(table))):
                source = table[index]
                if self.pool.ref_counts[source] == 1:
                    # A fork whose parent is gone may find its block full already, of tokens that are the parent's.
                    self.pool.forget(source)
                else:
                    table[index] = self.pool.take()
                    self.pool.release(source)
                    update.copies.append(BlockCopy(group, source, table[index]))
                    update.moves.append(BlockMove(seq_id, group, index, table[index]))
            for _ in range(last - len(table)):
                table.append(self.pool.take())
                update.new_blocks[group].append(table[-1])
        return update

    def allocate_cross(self, request_id: str, num_tokens: int) -> None:
        """Takes the blocks for a request's encoder tokens. `cross_blocks_for` must be free."""
        assert request_id not in self._cross_tables, f"request {request_id!r} holds cross-attention blocks already"
        tables: list[list[int]] = [[] for _ in self.specs]
        for group, spec in self._cross:
            tables[group] = [self.pool.take() for _ in range(-(-num_tokens // spec.block_size))]
        self._cross_tables[request_id] = tables

    def cross_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `allocate_cross` takes."""
        return sum(-(-num_tokens // spec.block_size) for _, spec in self._cross)

    def blocks_for(self, num_tokens: int, chunk: int) -> int:
        """Most blocks that a sequence holds at a time, over all decoder groups, when a step computes at most `chunk` of its tokens."""
        return sum(spec.blocks_for(num_tokens, chunk) for _, spec in self._decoder)

    def trim(self, seq_id: int, num_computed_tokens: int) -> None:
        """Gives back the blocks that no token from `num_computed_tokens` on can see.

        Not before the step that computes the token before is planned: until then its queries may need them.
        """
        for group, spec in self._windowed:
            table = self.get_block_table(seq_id, group)
            # The last of them first: as soon as one is gone, all before it are.
            for index in range(min(len(table), _first_visible(spec, num_computed_tokens)) - 1, -1, -1):
                if table[index] == NO_BLOCK:
                    break
                self.pool.release(table[index])
                table[index] = NO_BLOCK

    def fork(self, parent: int, child: int, num_tokens: int) -> None:
        """Lets `child` share the parent's first `num_tokens` tokens, the block that holds the last of them included."""
        assert child not in self._tables, f"sequence {child} holds blocks already"
        tables: list[list[int]] = [[] for _ in self.specs]
        for group, spec in self._decoder:
            tables[group] = self.get_block_table(parent, group)[: -(-num_tokens // spec.block_size)]
            for entry in tables[group]:
                if entry >= 0:
                    self.pool.share(entry)
                elif entry <= _FIRST_ON_HOST:
                    self.host_pool.share(_FIRST_ON_HOST - entry)
        self._tables[child] = tables
        self._published[child] = min(self._published.get(parent, 0), num_tokens)

    def free(self, seq_id: int) -> None:
        """Releases a sequence's blocks; those that it shares stay with their other owners."""
        self._published.pop(seq_id, None)
        self._release(self._tables.pop(seq_id, []))

    def free_cross(self, request_id: str) -> None:
        """Releases a request's cross-attention blocks."""
        self._release(self._cross_tables.pop(request_id, []))

    def reset(self) -> None:
        """Frees all, and forgets what the blocks held."""
        self._tables.clear()
        self._cross_tables.clear()
        self._published.clear()
        self.pool.reset()
        self.host_pool.reset()

    # Prefix caching

    def find_prefix(self, block_hashes: BlockHashes, limit: int) -> int:
        """How many of a sequence's first tokens, at most `limit`, have their keys and values in the cache, in every group."""
        step = math.lcm(*(spec.block_size for _, spec in self._decoder))
        length = limit // step * step
        for group, spec in self._decoder:
            if spec.window is None and length:
                hashes, found = block_hashes(spec.block_size, length // spec.block_size), 0
                while found < length // spec.block_size and self.pool.find((group, hashes[found])) is not None:
                    found += 1
                length = found * spec.block_size // step * step
        while gaps := [gap for group, spec in self._windowed if (gap := self._gap(group, spec, block_hashes, length)) is not None]:
            length = min(gaps) // step * step
        return length

    def num_shared(self, block_hashes: BlockHashes, num_tokens: int) -> int:
        """Of the blocks that `adopt` would take, how many have owners now and stay as long as the sequence does: they cost nothing."""
        full = {group for group, spec in self._decoder if spec.window is None}
        return sum(self.pool.ref_counts[block] > 0 for group, _, block in self._cached_blocks(block_hashes, num_tokens) if group in full)

    def adopt(self, seq_id: int, block_hashes: BlockHashes, num_tokens: int) -> None:
        """Gives a sequence the cached blocks of its first `num_tokens` tokens, which `find_prefix` has found."""
        assert seq_id not in self._tables, f"sequence {seq_id} holds blocks already"
        tables: list[list[int]] = [[] for _ in self.specs]
        for group, spec in self._decoder:
            tables[group] = [NO_BLOCK] * (num_tokens // spec.block_size)
        for group, index, block in self._cached_blocks(block_hashes, num_tokens):
            self.pool.share(block)
            tables[group][index] = block
        self._tables[seq_id] = tables
        self._published[seq_id] = num_tokens

    def publish(self, seq_id: int, block_hashes: BlockHashes, num_tokens: int) -> None:
        """Lets others find the full blocks of a sequence's first `num_tokens` tokens, which are computed or will be in the planned step."""
        if seq_id not in self._tables:
            return
        before = self._published.get(seq_id, 0)
        if num_tokens // self._gcd == before // self._gcd:
            return
        for group, spec in self._decoder:
            table, full = self.get_block_table(seq_id, group), num_tokens // spec.block_size
            if full > before // spec.block_size:
                hashes = block_hashes(spec.block_size, full)
                for index in range(before // spec.block_size, full):
                    if table[index] >= 0:
                        self.pool.publish((group, hashes[index]), table[index])
        self._published[seq_id] = num_tokens

    def forget_contents(self, seq_id: int) -> None:
        """Nobody is to find a sequence's blocks: what they hold is in doubt."""
        for group, _ in self._decoder:
            for block in self.get_block_table(seq_id, group):
                if block >= 0:
                    self.pool.forget(block)

    def _gap(self, group: int, spec: KVCacheSpec, block_hashes: BlockHashes, length: int) -> int | None:
        """Where the first block begins that the token after `length` can see and that is not cached. No prefix may end behind it."""
        last = length // spec.block_size
        hashes, first = block_hashes(spec.block_size, last), _first_visible(spec, length)
        return next((i * spec.block_size for i in range(first, last) if self.pool.find((group, hashes[i])) is None), None)

    def _cached_blocks(self, block_hashes: BlockHashes, num_tokens: int) -> Iterator[tuple[int, int, int]]:
        """(group, index in the table, block) of a cached prefix."""
        for group, spec in self._decoder:
            last = num_tokens // spec.block_size
            hashes = block_hashes(spec.block_size, last)
            for index in range(_first_visible(spec, num_tokens), last):
                block = self.pool.find((group, hashes[index]))
                assert block is not None, "the prefix is not cached"
                yield group, index, block

    # Swap

    def swap_out(self, request_id: str, seq_ids: Sequence[int]) -> list[BlockCopy] | None:
        """Moves a request's blocks to the host pool, but for those that others share; None, and nothing done, where they do not fit.

        The copies are from the device (source) to the host (target).
        """
        moved = self._own_blocks(request_id, seq_ids)
        if len(moved) > self.host_pool.num_free:
            return None
        return self._move(request_id, seq_ids, moved, self.pool, self.host_pool)

    def num_swapped(self, request_id: str, seq_ids: Sequence[int]) -> int:
        """Blocks that `swap_in` takes from the device pool."""
        return len({entry for _, entry in self._entries(request_id, seq_ids) if entry <= _FIRST_ON_HOST})

    def swap_in(self, request_id: str, seq_ids: Sequence[int]) -> list[BlockCopy]:
        """Moves a request's blocks back. `num_swapped` must be free. The copies are from the host (source) to the device (target)."""
        moved = {entry for _, entry in self._entries(request_id, seq_ids) if entry <= _FIRST_ON_HOST}
        return self._move(request_id, seq_ids, moved, self.host_pool, self.pool)

    def num_own_blocks(self, request_id: str, seq_ids: Sequence[int]) -> int:
        """Blocks that `swap_out` would move."""
        return len(self._own_blocks(request_id, seq_ids))

    def _own_blocks(self, request_id: str, seq_ids: Sequence[int]) -> set[int]:
        """Of a request's blocks on the device, those that no other request shares."""
        counts = Counter(entry for _, entry in self._entries(request_id, seq_ids) if entry >= 0)
        return {block for block, count in counts.items() if self.pool.ref_counts[block] == count}

    def _move(self, request_id: str, seq_ids: Sequence[int], moved: set[int], source: BlockPool, target: BlockPool) -> list[BlockCopy]:
        new: dict[int, int] = {}
        copies = []
        for group, table in self._tables_of(request_id, seq_ids):
            for index, entry in enumerate(table):
                if entry not in moved:
                    continue
                block = entry if entry >= 0 else _FIRST_ON_HOST - entry
                if entry in new:
                    target.share(new[entry])
                else:
                    new[entry] = target.take()
                    copies.append(BlockCopy(group, block, new[entry]))
                source.release(block)
                table[index] = new[entry] if target is self.pool else _FIRST_ON_HOST - new[entry]
        return copies

    def _tables_of(self, request_id: str, seq_ids: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """(group, table) of each of a request's tables."""
        for tables in (self._cross_tables.get(request_id, []), *(self._tables.get(seq_id, []) for seq_id in seq_ids)):
            yield from enumerate(tables)

    def _entries(self, request_id: str, seq_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        return ((group, entry) for group, table in self._tables_of(request_id, seq_ids) for entry in table)

    # Accounting

    def _owners(self, entry: int) -> int:
        return self.pool.ref_counts[entry] if entry >= 0 else self.host_pool.ref_counts[_FIRST_ON_HOST - entry]

    def _release(self, tables: list[list[int]]) -> None:
        for table in tables:
            # From the end, so that a sequence's first blocks, the likeliest to be wanted again, are reused last.
            for entry in reversed(table):
                if entry >= 0:
                    self.pool.release(entry)
                elif entry <= _FIRST_ON_HOST:
                    self.host_pool.release(_FIRST_ON_HOST - entry)

    def check(self) -> None:
        """Asserts the invariants."""
        every = [*self._tables.values(), *self._cross_tables.values()]
        device = Counter(entry for tables in every for table in tables for entry in table if entry >= 0)
        host = Counter(_FIRST_ON_HOST - entry for tables in every for table in tables for entry in table if entry <= _FIRST_ON_HOST)
        for pool, owners in ((self.pool, device), (self.host_pool, host)):
            assert all(pool.ref_counts[b] == owners.get(b, 0) for b in range(pool.num_blocks)), "reference counts differ from owners"
            assert pool.num_free + len(owners) == pool.num_blocks, "free + owned blocks differ from the total"
        for tables in every:
            for table in tables:
                held = [entry for entry in table if entry != NO_BLOCK]
                assert len(set(held)) == len(held), "a table names a block twice"


def _first_visible(spec: KVCacheSpec, num_tokens: int) -> int:
    """The first block that the token after `num_tokens` can see."""
    return 0 if spec.window is None else max(0, num_tokens - spec.window + 1) // spec.block_size
