"""Block tables: which blocks hold the keys and values of which tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from llm_toolkit.attention import KVCacheSpec
from llm_toolkit.messages import BlockCopy, BlockMove
from llm_toolkit.scheduler.block_pool import BlockPool


class Write(NamedTuple):
    """Tokens [start, end) of a sequence that a step is about to write."""

    seq_id: int
    start: int
    end: int


class Growth(NamedTuple):
    """What changed in a sequence's tables to make room for a write."""

    new_blocks: list[list[int]]
    """Per KV group, the blocks appended."""
    copies: list[BlockCopy]
    moves: list[BlockMove]


NO_BLOCK = -1
"""A table's entry for tokens that a window has left behind."""


class BlockManager:
    """One table per (sequence, KV group) over one pool.

    Invariants (`check`): a block's reference count equals the number of table entries that name it; free + owned = total; nobody
    writes a block that has another owner (copy on write).
    """

    def __init__(self, pool: BlockPool, specs: Sequence[KVCacheSpec]) -> None:
        """`specs`: of each KV group."""
        self.pool = pool
        self.specs = list(specs)
        self._windowed = [(group, spec) for group, spec in enumerate(specs) if spec.window is not None]
        self._tables: dict[int, list[list[int]]] = {}

    def get_block_table(self, seq_id: int, group: int = 0) -> list[int]:
        """The blocks of a sequence, in the order of its tokens, NO_BLOCK where a window has passed; empty for one that holds none."""
        return self._tables[seq_id][group] if seq_id in self._tables else []

    def blocks_needed(self, writes: Iterable[Write]) -> int:
        """Free blocks that `append_slots` of all `writes` together takes: new ones, and copies of shared ones."""
        needed, writers = 0, Counter[int]()
        for seq_id, start, end in writes:
            for group, size in enumerate(self._sizes):
                table = self.get_block_table(seq_id, group)
                needed += max(0, -(-end // size) - len(table))
                writers.update(table[start // size : -(-end // size)])
        # Of a shared block's writers each takes a copy, but for the one that is left as its only owner.
        return needed + sum(min(count, self.pool.ref_counts[block] - 1) for block, count in writers.items())

    def append_slots(self, write: Write) -> Growth:
        """Makes the slots of `write` exist and be the sequence's own. `blocks_needed` must be free."""
        tables = self._tables.setdefault(write.seq_id, [[] for _ in self.specs])
        growth = Growth([], [], [])
        for group, (table, size) in enumerate(zip(tables, self._sizes, strict=True)):
            last = -(-write.end // size)
            for index in range(write.start // size, min(last, len(table))):
                source = table[index]
                if self.pool.ref_counts[source] > 1:
                    table[index] = self.pool.take()
                    self.pool.release(source)
                    growth.copies.append(BlockCopy(group, source, table[index]))
                    growth.moves.append(BlockMove(write.seq_id, group, index, table[index]))
            new = [self.pool.take() for _ in range(last - len(table))]
            table.extend(new)
            growth.new_blocks.append(new)
        return growth

    def blocks_for(self, num_tokens: int, chunk: int) -> int:
        """Most blocks that a sequence holds at a time, over all groups, when a step computes at most `chunk` of its tokens."""
        return sum(spec.blocks_for(num_tokens, chunk) for spec in self.specs)

    def trim(self, seq_id: int, num_computed_tokens: int) -> None:
        """Gives back the blocks that no token from `num_computed_tokens` on can see.

        Not before the step that computes the token before is planned: until then its queries may need them.
        """
        for group, spec in self._windowed:
            assert spec.window is not None
            table = self._tables[seq_id][group] if seq_id in self._tables else []
            # The last of them first: as soon as one is gone, all before it are.
            for index in range(min(len(table), max(0, num_computed_tokens - spec.window + 1) // spec.block_size) - 1, -1, -1):
                if table[index] == NO_BLOCK:
                    break
                self.pool.release(table[index])
                table[index] = NO_BLOCK

    def fork(self, parent: int, child: int, num_tokens: int) -> None:
        """Lets `child` share the parent's first `num_tokens` tokens, the block that holds the last of them included."""
        assert child not in self._tables, f"sequence {child} holds blocks already"
        tables = []
        for group, size in enumerate(self._sizes):
            shared = self.get_block_table(parent, group)[: -(-num_tokens // size)]
            for block in shared:
                if block != NO_BLOCK:
                    self.pool.share(block)
            tables.append(list(shared))
        self._tables[child] = tables

    def free(self, seq_id: int) -> None:
        """Releases a sequence's blocks; those that it shares stay with their other owners."""
        for table in self._tables.pop(seq_id, []):
            # From the end, so that a sequence's first blocks, the likeliest to be wanted again, are reused last.
            for block in reversed(table):
                if block != NO_BLOCK:
                    self.pool.release(block)

    def check(self) -> None:
        """Asserts the invariants."""
        owners = Counter(block for tables in self._tables.values() for table in tables for block in table if block != NO_BLOCK)
        assert all(self.pool.ref_counts[b] == owners.get(b, 0) for b in range(self.pool.num_blocks)), "reference counts differ from owners"
        assert self.pool.num_free + len(owners) == self.pool.num_blocks, "free + owned blocks differ from the total"
        for tables in self._tables.values():
            for table in tables:
                held = [block for block in table if block != NO_BLOCK]
                assert len(set(held)) == len(held), "a table names a block twice"

    @property
    def _sizes(self) -> list[int]:
        return [spec.block_size for spec in self.specs]
