"""Encoder: a request's encoder sequence, and the blocks of its keys and values for cross
attention."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from toolkit_lm.kv.block_manager import BlockManager
from toolkit_lm.kv.group_blocks import GroupBlocks
from toolkit_lm.messages import CacheKey, EncoderInput, NewEncoder


class Encoder:
    """What the scheduler knows of an encoder sequence. It is computed as a whole, in the step in
    which its decoder begins.

    Its blocks are written once. Requests with the same input share them, and find them until others
    need the memory.
    """

    def __init__(
        self, seq_id: int, input: EncoderInput, salt: str, cache_keys: Sequence[CacheKey]
    ) -> None:
        self.seq_id = seq_id
        self.input = input
        self.num_tokens = input.num_tokens
        self.digest = hashlib.sha256(msgspec.msgpack.encode((salt, cache_keys, input))).hexdigest()
        """Of all that its keys and values depend on."""
        self.is_computed = False
        """Its keys and values are in its blocks, or will be with the planned step."""
        self.on_worker = False

    def block_hashes(self, block_size: int, num_blocks: int) -> list[bytes]:
        """Names of its blocks. Every token sees all others, so that each block depends on the
        whole."""
        return [f"{self.digest} {index}".encode() for index in range(num_blocks)]

    def as_new(self, block_tables: list[list[int]]) -> NewEncoder:
        """For a runner that does not hold it."""
        return NewEncoder(
            encoder_id=self.seq_id,
            num_tokens=self.num_tokens,
            block_tables=block_tables,
            input=None if self.is_computed else self.input,
        )


class CrossBlocks:
    """The blocks of encoder sequences: the tables of the KV groups that are kept of encoders."""

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self._groups = [group for group in blocks.groups if group.spec.of_encoder]

    def is_cached(self, encoder: Encoder) -> bool:
        """All of its keys and values are in the cache."""
        return all(
            group.gap(encoder.block_hashes, _whole(group, encoder)) is None
            for group in self._groups
        )

    def num_needed(self, encoder: Encoder, *, cached: bool) -> list[int]:
        """Free blocks per pool that `allocate` takes, or, of cached ones, `adopt`: those that
        nobody owns."""
        needed = [0] * len(self.blocks.pools)
        for group in self._groups:
            if cached:
                found = group.cached(encoder.block_hashes, _whole(group, encoder))
                needed[group.pool_index] += sum(
                    group.pool.ref_counts[block] == 0 for _, block in found
                )
            else:
                needed[group.pool_index] += group.spec.num_blocks(encoder.num_tokens)
        return needed

    def allocate(self, encoder: Encoder, *, publish: bool) -> None:
        """Blocks to be written by the planned step. `num_needed` must be free. `publish`: others of
        the same input are to find them."""
        tables = self.blocks.new_tables(encoder.seq_id)
        for group in self._groups:
            group.extend(tables[group.index], 0, encoder.num_tokens)
            if publish:
                group.publish(tables[group.index], encoder.block_hashes, 0, _whole(group, encoder))

    def adopt(self, encoder: Encoder) -> None:
        """Gives it the cached blocks of its input."""
        tables = self.blocks.new_tables(encoder.seq_id)
        for group in self._groups:
            tables[group.index] = group.adopt(encoder.block_hashes, _whole(group, encoder))


def _whole(group: GroupBlocks, encoder: Encoder) -> int:
    """Tokens of its blocks: nothing is ever added to the last one, so that it counts as full."""
    return group.spec.num_blocks(encoder.num_tokens) * group.size
