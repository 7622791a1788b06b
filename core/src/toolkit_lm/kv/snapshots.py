"""Snapshots: copies of recurrent states, from which other sequences begin."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit_lm.kv.block_manager import BlockManager
from toolkit_lm.kv.group_blocks import BlockHashes, BlockPool, SnapshotBlocks, TokenRange
from toolkit_lm.messages import BlockCopy, StepPlan


class Snapshots:
    """Says where steps of prompts end so that snapshots can be kept, and has plans make them."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._groups = [group for group in blocks.groups if isinstance(group, SnapshotBlocks)]
        self._kept: list[tuple[BlockPool, int]] = []
        """Snapshots that the step being planned copies, by pool. They are not evicted until it is
        planned."""

    def __bool__(self) -> bool:
        return bool(self._groups)

    def next_stop(self, start: int, num_prompt_tokens: int) -> int:
        """Token after which a step that begins at token `start` of a prompt must end; 0: any."""
        border = self._blocks.border
        stops = [group.stop(start, num_prompt_tokens, border) for group in self._groups]
        return min(filter(None, stops), default=0)

    def keep(
        self,
        tokens: TokenRange,
        num_prompt_tokens: int,
        block_hashes: BlockHashes,
        plan: StepPlan,
        ranges: Sequence[TokenRange],
    ) -> None:
        """Has the plan copy the states that a sequence has before `tokens`, where others are to
        find them, and where there is a block beside those that all `ranges` of the request take.
        Before their `append_slots`."""
        seq_id, start, _ = tokens
        for group in self._groups if start else ():
            table = self._blocks.get_block_table(seq_id, group.index)
            if not group.is_kept(table, start, num_prompt_tokens, self._blocks.border):
                continue
            room = group.pool.num_free > self._blocks.blocks_needed(ranges)[group.pool_index]
            copy = group.keep(table, block_hashes, start, room=room)
            if copy is not None:
                plan.copies.append(BlockCopy(group.index, group.own(table), copy))
                self._kept.append((group.pool, copy))

    def release(self) -> None:
        """The step is planned: its snapshots are free, and found until they are evicted. Before,
        something else might be written to them, and then the copy over it."""
        for pool, block in self._kept:
            pool.release(block)
        self._kept.clear()

    def reset(self) -> None:
        """The pools have been reset."""
        self._kept.clear()

    def forget(self, block_hashes: BlockHashes, num_tokens: int) -> None:
        """Nobody is to begin from the states of a sequence's first `num_tokens` tokens: they are in
        doubt."""
        for group in self._groups:
            group.forget_snapshots(block_hashes, num_tokens)
