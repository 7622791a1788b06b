"""Block tables: the blocks of each sequence, per KV group."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from toolkit_lm.kv.group_blocks import (
    HOST,
    BlockHashes,
    BlockPool,
    Entry,
    Find,
    GroupBlocks,
    Location,
    SnapshotBlocks,
    Table,
    TokenRange,
)
from toolkit_lm.kv.layout import KVCacheConfig
from toolkit_lm.kv.spec import max_drafts
from toolkit_lm.messages import BlockCopy, BlockMove, StepPlan

_NONE: list[int] = []
"""Block table of a sequence that holds no blocks in a group."""


class BlockManager:
    """One block table per (sequence, KV group), over device and host pools.

    Encoder sequences count as sequences (`CrossBlocks`). A group has tables either of them or of
    all others.

    Numbers of blocks are per pool. Invariants (`check`):

    - in each pool a block's reference count equals the number of table entries that name it, and
      free + owned = total;
    - distinct blocks of a request = the union of its sequences' tables;
    - `swap_out` moves, and `free` releases, exactly those of them whose reference count reaches
      zero: all, when nothing is shared with another request;
    - a block with several owners is never written (copy on write).
    """

    def __init__(self, kv_cache: KVCacheConfig) -> None:
        self.config = kv_cache
        self.pools = [BlockPool(pool.num_blocks) for pool in kv_cache.pools]
        self.host_pools = [BlockPool(pool.num_host_blocks) for pool in kv_cache.pools]
        self.groups = [
            (SnapshotBlocks if group.spec.snapshots else GroupBlocks)(
                index, group.spec, group.pool, self.pools[group.pool], self.host_pools[group.pool]
            )
            for index, group in enumerate(kv_cache.groups)
        ]
        self._of_sequences = [group for group in self.groups if not group.spec.of_encoder]
        specs = [group.spec for group in self._of_sequences]
        self.caches_prefixes = bool(specs) and kv_cache.without_prefixes is None
        self.forks_anywhere = all(spec.forks_anywhere for spec in specs)
        self.max_drafts = max_drafts(specs)
        self.shared_within_step = all(spec.shared_within_step for spec in specs)
        pools = range(len(self.pools))
        self._groups_per_pool = [
            sum(group.pool_index == pool for group in self._of_sequences) for pool in pools
        ]
        self._growing = [
            any(group.pool_index == pool and group.spec.grows for group in self.groups)
            for pool in pools
        ]
        """Per pool: whether its block tables grow with their sequences."""
        self._most_lag = max((spec.lag for spec in specs), default=0)
        self.none = [_NONE] * len(self.groups)
        """New blocks, per KV group, of a row that needs none."""
        units = [group.unit for group in self._of_sequences]
        self.stride = math.gcd(*units) or 1
        """Common divisor of the groups' block sizes. Blocks and snapshots begin at multiples of it
        in each group."""
        self._lookahead = max((spec.lookahead for spec in specs), default=0)
        self.edges = {0, self.stride - 1, *(-spec.lookahead % self.stride for spec in specs)}
        """Positions inside `stride` tokens. A token elsewhere is in the block of the one before,
        fills no block, and its last look-ahead slot is in the block of the one before, too."""
        self.border = math.lcm(*units)
        """Cached prefixes end at multiples of it."""
        self._beyond = max((group.beyond for group in self._of_sequences), default=0)
        self._trimmed = [group for group in self.groups if group.spec.first_needed(2**30)]
        self.trims = bool(self._trimmed)
        """Whether `trim` can free anything."""
        self._tables: dict[int, list[Table]] = {}
        self._published: dict[int, int] = {}
        """Number of tokens whose full blocks are published, by seq_id."""
        self.on_published: Callable[[int, GroupBlocks, list[int]], object] | None = None
        """Called with a sequence, a group, and the indices in the block table of the blocks that
        can be found from now on."""

    # Tables

    def get_block_table(self, seq_id: int, group: int = 0) -> Table:
        """Blocks of a sequence in the order of its tokens. None stands for a block that has left
        the window. Empty if the sequence holds none."""
        return self._tables[seq_id][group] if seq_id in self._tables else []

    def worker_tables(self, seq_id: int) -> list[list[int]]:
        """Block tables of a sequence as workers get them, per KV group. Entries that have left the
        window hold any valid block, since no query reads them."""
        return [
            [entry if isinstance(entry, int) else 0 for entry in table]
            for table in self._tables.get(seq_id, [[]] * len(self.groups))
        ]

    def blocks_needed(self, ranges: Iterable[TokenRange]) -> list[int]:
        """Number of free blocks that `append_slots` takes for all `ranges` together."""
        needed = [0] * len(self.pools)
        spare: list[dict[Entry, int]] = [{} for _ in self.pools]
        for seq_id, start, end in ranges:
            tables = self._tables.get(seq_id)
            for group in self._of_sequences:
                table = tables[group.index] if tables else []
                needed[group.pool_index] += group.num_needed(
                    table, start, end, spare[group.pool_index]
                )
        return needed

    def has_free(self, needed: Sequence[int], reserve: int = 0) -> bool:
        """Whether this many blocks are free, and `reserve` more in pools whose tables grow."""
        for pool, count, grows in zip(self.pools, needed, self._growing, strict=True):
            if count + (reserve if grows else 0) > pool.num_free:
                return False
        return True

    def fits(self, ranges: Sequence[TokenRange]) -> bool:
        """Whether the blocks are free that `append_slots` takes for all `ranges` together."""
        most = 0
        for _, start, end in ranges:
            most += (end - start) + 1 + self._lookahead
        # N tokens touch at most N + 1 blocks of a group: if this many are free, an exact count is
        # unnecessary.
        most += self._most_lag * len(ranges)
        for pool, groups in zip(self.pools, self._groups_per_pool, strict=True):
            if most * groups > pool.num_free:
                return self.has_free(self.blocks_needed(ranges))
        return True

    def append_slots(self, tokens: TokenRange, plan: StepPlan) -> list[list[int]]:
        """Allocates the slots of `tokens`, in blocks that the sequence alone owns. `blocks_needed`
        blocks must be free.

        Returns the appended blocks, per KV group. Copies go into the plan.
        """
        seq_id, start, end = tokens
        tables = self._tables.get(seq_id)
        if tables is None:
            tables = self.new_tables(seq_id)
        new_blocks = list(self.none)
        for group in self._of_sequences:
            table = tables[group.index]
            new_blocks[group.index], copied = group.extend(table, start, end)
            for index, source, copy in copied:
                plan.copies.append(BlockCopy(group.index, source, copy))
                plan.moves.append(BlockMove(seq_id, group.index, index, copy))
        return new_blocks

    def new_tables(self, seq_id: int) -> list[Table]:
        """Makes empty block tables, per KV group, for a sequence that has none."""
        assert seq_id not in self._tables, f"sequence {seq_id} holds blocks already"
        tables: list[Table] = [[] for _ in self.groups]
        self._tables[seq_id] = tables
        return tables

    def trim(self, seq_id: int, num_computed_tokens: int) -> None:
        """Frees the blocks that no token from `num_computed_tokens` on can see.

        Call it only after the step that computes the previous token is planned: its queries may
        still need the blocks.
        """
        if (tables := self._tables.get(seq_id)) is not None:
            for group in self._trimmed:
                group.trim(tables[group.index], num_computed_tokens)

    def fork(self, parent: int, child: int, num_tokens: int) -> None:
        """Makes `child` share the parent's first `num_tokens` tokens, with the block that holds the
        last of them."""
        assert child not in self._tables, f"sequence {child} holds blocks already"
        self._tables[child] = [
            group.fork(self.get_block_table(parent, group.index), num_tokens)
            for group in self.groups
        ]
        self._published[child] = min(self._published.get(parent, 0), num_tokens)

    def free(self, seq_id: int) -> None:
        """Releases a sequence's blocks. Shared blocks stay with their other owners."""
        self._published.pop(seq_id, None)
        for group, table in zip(self.groups, self._tables.pop(seq_id, ()), strict=False):
            group.release(table)

    def reset(self) -> None:
        """Frees all blocks, and forgets their contents."""
        self._tables.clear()
        self._published.clear()
        for pool in (*self.pools, *self.host_pools):
            pool.reset()

    # Prefix caching

    def find_prefix(
        self, block_hashes: BlockHashes, limit: int, elsewhere: Find | None = None
    ) -> int:
        """Number of a sequence's first tokens, at most `limit`, that every group has in the cache
        or `elsewhere`."""
        length = (limit - self._beyond) // self.border * self.border
        if length <= 0:
            return 0
        while gaps := [
            gap
            for group in self._of_sequences
            if (gap := group.gap(block_hashes, length, elsewhere)) is not None
        ]:
            length = min(gaps) // self.border * self.border
        return length

    def num_shared(self, block_hashes: BlockHashes, num_tokens: int) -> list[int]:
        """Number of blocks, per pool, that `adopt` would share with present owners for the
        sequence's whole life. They need no free blocks."""
        shared = [0] * len(self.pools)
        for group in self._of_sequences:
            if group not in self._trimmed:
                kept = group.whole(num_tokens)
                cached = group.cached(block_hashes, num_tokens)
                shared[group.pool_index] += sum(
                    index < kept and group.pool.ref_counts[block] > 0 for index, block in cached
                )
        return shared

    def adopt(self, seq_id: int, block_hashes: BlockHashes, num_tokens: int) -> None:
        """Gives a sequence the cached blocks of its first `num_tokens` tokens, as found by
        `find_prefix`."""
        tables = self.new_tables(seq_id)
        for group in self._of_sequences:
            tables[group.index] = group.adopt(block_hashes, num_tokens)
        self._published[seq_id] = num_tokens

    def publish(self, seq_id: int, block_hashes: BlockHashes, num_tokens: int) -> None:
        """Makes the full blocks of a sequence's first `num_tokens` tokens available to others. The
        tokens are computed, or will be in the planned step."""
        tables = self._tables.get(seq_id)
        before = self._published.get(seq_id, 0)
        if tables is None or (
            num_tokens // self.stride == before // self.stride and not self._most_lag
        ):
            return
        for group in self._of_sequences:
            new = group.publish(tables[group.index], block_hashes, before, num_tokens)
            if new and self.on_published is not None:
                self.on_published(seq_id, group, new)
        self._published[seq_id] = num_tokens

    def forget_contents(self, seq_id: int) -> None:
        """Unpublishes a sequence's blocks, since their contents are in doubt."""
        for group in self.groups:
            group.forget_contents(self.get_block_table(seq_id, group.index))

    # Swap

    def swap_out(self, seq_ids: Sequence[int]) -> list[BlockCopy] | None:
        """Swaps a request's blocks out to the host pools, except those shared with other requests.
        Returns None, with nothing changed, if they do not fit.

        The copies are from the device (source) to the host (target).
        """
        moved = self._own_blocks(seq_ids)
        if any(
            len(blocks) > pool.num_free for blocks, pool in zip(moved, self.host_pools, strict=True)
        ):
            return None
        new: list[dict[int, int]] = [{} for _ in self.pools]
        copies = []
        for group, table in self._tables_of(seq_ids):
            targets = new[group.pool_index]
            for index, block in enumerate(table):
                if not isinstance(block, int) or block not in moved[group.pool_index]:
                    continue
                if block in targets:
                    group.host_pool.share(targets[block])
                else:
                    targets[block] = group.host_pool.allocate()
                    copies.append(BlockCopy(group.index, block, targets[block]))
                group.pool.release(block)
                table[index] = Location(HOST, targets[block])
        return copies

    def num_swapped(self, seq_ids: Sequence[int]) -> list[int]:
        """Number of blocks that `swap_in` takes from the device pools."""
        return [len(blocks) for blocks in self._hosted(seq_ids)]

    def swap_in(self, seq_ids: Sequence[int]) -> list[BlockCopy]:
        """Swaps a request's blocks in. `num_swapped` blocks must be free. The copies are from the
        host (source) to the device (target)."""
        new: list[dict[Location, int]] = [{} for _ in self.pools]
        copies = []
        for group, table in self._tables_of(seq_ids):
            targets = new[group.pool_index]
            for index, place in enumerate(table):
                if not isinstance(place, Location):
                    continue
                if place in targets:
                    group.pool.share(targets[place])
                else:
                    targets[place] = group.pool.allocate()
                    copies.append(BlockCopy(group.index, place.id, targets[place]))
                group.host_pool.release(place.id)
                table[index] = targets[place]
        return copies

    def num_own_bytes(self, seq_ids: Sequence[int]) -> int:
        """Bytes of the blocks that `swap_out` would move."""
        return sum(
            len(own) * pool.block_bytes
            for own, pool in zip(self._own_blocks(seq_ids), self.config.pools, strict=True)
        )

    def _own_blocks(self, seq_ids: Sequence[int]) -> list[set[int]]:
        """A request's blocks on the device that no other request shares, per pool."""
        counts: list[Counter[int]] = [Counter() for _ in self.pools]
        for group, table in self._tables_of(seq_ids):
            counts[group.pool_index].update(entry for entry in table if isinstance(entry, int))
        return [
            {block for block, n in count.items() if pool.ref_counts[block] == n}
            for count, pool in zip(counts, self.pools, strict=True)
        ]

    def _hosted(self, seq_ids: Sequence[int]) -> list[set[Location]]:
        """Locations of a request's blocks off the device, per pool."""
        hosted: list[set[Location]] = [set() for _ in self.pools]
        for group, table in self._tables_of(seq_ids):
            hosted[group.pool_index].update(e for e in table if isinstance(e, Location))
        return hosted

    def _tables_of(self, seq_ids: Sequence[int]) -> Iterator[tuple[GroupBlocks, Table]]:
        """Yields each block table of a request, with its group."""
        for seq_id in seq_ids:
            yield from zip(self.groups, self._tables.get(seq_id, ()), strict=False)

    # Accounting

    @property
    def num_used(self) -> int:
        return sum(pool.num_used for pool in self.pools)

    @property
    def num_used_on_host(self) -> int:
        return sum(pool.num_used for pool in self.host_pools)
