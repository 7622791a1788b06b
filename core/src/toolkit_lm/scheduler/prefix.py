"""What a KV cache block holds, as a hash over all tokens up to its end."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import msgspec


def root_hash(*extra: object) -> bytes:
    """What the first hash of a sequence begins with: whatever else decides on keys and values beside the tokens.

    The plugin set, the adapter, the caller's salt: requests that differ in any of these share nothing.
    """
    return hashlib.sha256(msgspec.msgpack.encode(extra)).digest()


class PrefixHashes:
    """The hashes of a sequence's full blocks: each over its parent and its own tokens (SHA-256, so that nobody can make two collide)."""

    def __init__(self, root: bytes) -> None:
        self._root = root
        self._hashes: dict[int, list[bytes]] = {}
        """By block size."""

    def block_hashes(self, token_ids: Sequence[int], block_size: int, num_blocks: int) -> list[bytes]:
        """At least the first `num_blocks` hashes of blocks of this size. The tokens may have grown since the last call, not changed."""
        hashes = self._hashes.setdefault(block_size, [])
        for index in range(len(hashes), num_blocks):
            tokens = token_ids[index * block_size : (index + 1) * block_size]
            assert len(tokens) == block_size, "only full blocks have a hash"
            parent = hashes[-1] if hashes else self._root
            hashes.append(hashlib.sha256(parent + array("q", tokens).tobytes()).digest())
        return hashes

    def fork(self) -> PrefixHashes:
        """For a sequence that has the same tokens so far."""
        other = PrefixHashes(self._root)
        other._hashes = {size: list(hashes) for size, hashes in self._hashes.items()}
        return other
