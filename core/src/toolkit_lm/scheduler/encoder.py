"""Encoder: a request's encoder sequence, and its blocks of keys and values for cross attention."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
from msgspec import structs

from toolkit_lm.kv.block_manager import BlockManager
from toolkit_lm.kv.group_blocks import GroupBlocks
from toolkit_lm.messages import (
    CacheKey,
    EncoderInput,
    EngineRequest,
    MultiModalFeatureSpec,
    NewEncoder,
    PlaceholderRange,
)


class Encoder:
    """The scheduler's state of an encoder sequence. The sequence is computed as a whole, in the
    step in which its decoder begins.

    Its blocks are written once. Requests with the same input share them. They stay in the cache
    until their memory is needed.
    """

    def __init__(
        self, seq_id: int, input: EncoderInput, salt: str, cache_keys: Sequence[CacheKey]
    ) -> None:
        self.seq_id = seq_id
        self.input = input
        self.num_tokens = input.num_tokens
        self.digest = self.renew(salt, cache_keys)
        """Digest of everything that the keys and values depend on."""
        self.is_computed = False
        """The keys and values are in the blocks, or will be after the planned step."""
        self.on_worker = False

    def renew(self, salt: str, cache_keys: Sequence[CacheKey]) -> str:
        """Makes the digest anew, and returns it."""
        content = msgspec.msgpack.encode((salt, cache_keys, self.input))
        self.digest = hashlib.sha256(content).hexdigest()
        return self.digest

    def block_hashes(self, block_size: int, num_blocks: int) -> list[bytes]:
        """Hashes of the encoder's blocks. Every token attends to all others, so each block depends
        on the whole input."""
        return [f"{self.digest} {index}".encode() for index in range(num_blocks)]

    def as_new(self, block_tables: list[list[int]]) -> NewEncoder:
        """Returns the message that makes the sequence known to the runner."""
        return NewEncoder(
            encoder_id=self.seq_id,
            num_tokens=self.num_tokens,
            block_tables=block_tables,
            input=None if self.is_computed else self.input,
        )


class CrossBlocks:
    """Allocates the blocks of encoder sequences, in the KV groups of cross attention."""

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self._groups = [group for group in blocks.groups if group.spec.of_encoder]

    def is_cached(self, encoder: Encoder) -> bool:
        """Whether the cache holds all keys and values of the encoder."""
        return all(
            group.gap(encoder.block_hashes, _whole(group, encoder)) is None
            for group in self._groups
        )

    def num_needed(self, encoder: Encoder, *, cached: bool) -> list[int]:
        """Number of free blocks per pool that `allocate` takes. For a cached encoder: that `adopt`
        takes, which are the blocks without an owner."""
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
        """Allocates blocks for the planned step to write. `num_needed` blocks must be free.
        `publish`: other requests with the same input can find them."""
        tables = self.blocks.new_tables(encoder.seq_id)
        for group in self._groups:
            group.extend(tables[group.index], 0, encoder.num_tokens)
            if publish:
                group.publish(tables[group.index], encoder.block_hashes, 0, _whole(group, encoder))

    def adopt(self, encoder: Encoder) -> None:
        """Gives the encoder the cached blocks of its input."""
        tables = self.blocks.new_tables(encoder.seq_id)
        for group in self._groups:
            tables[group.index] = group.adopt(encoder.block_hashes, _whole(group, encoder))


def _whole(group: GroupBlocks, encoder: Encoder) -> int:
    """Number of tokens that the blocks hold. Nothing is ever appended to the last block, so it
    counts as full."""
    return group.spec.num_blocks(encoder.num_tokens) * group.size


def over_prompt(message: EngineRequest) -> list[MultiModalFeatureSpec]:
    """The items of a request whose prompt must be whole: each has all of it for its place."""
    features = []
    for feature in message.features:
        place = feature.mm_position
        mask = [False] * len(message.prompt_token_ids)
        mask[place.offset : place.end] = place.mask or [True] * place.length
        features.append(structs.replace(feature, mm_position=PlaceholderRange(0, len(mask), mask)))
    return features
