"""What a KV cache block holds, as a hash over all tokens up to its end."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import msgspec

from toolkit_lm.messages import CacheKey


class PrefixHashes:
    """The hashes of a sequence's full blocks (SHA-256, so that nobody can make two collide).

    Each is over the one before, the block's tokens, and what else their keys and values depend on.
    The first is over `salt`, which stands for the plugin set.
    """

    def __init__(self, salt: str, keys: Sequence[CacheKey] = ()) -> None:
        self._salt = salt
        self._keys = keys
        self._hashes: dict[int, list[bytes]] = {}
        """By block size."""

    def block_hashes(
        self, token_ids: Sequence[int], block_size: int, num_blocks: int
    ) -> list[bytes]:
        """At least the first `num_blocks` hashes of blocks of this size. The tokens may have grown
        since the last call, not changed."""
        hashes = self._hashes.setdefault(block_size, [])
        for index in range(len(hashes), num_blocks):
            start = index * block_size
            end = (index + 1) * block_size
            assert len(token_ids) >= end, "only full blocks have a hash"
            parent = hashes[-1] if hashes else self._salt.encode()
            keys: list[CacheKey] = []
            if self._keys:
                keys = [key for key in self._keys if key.start < end and start < key.end]
            hashes.append(
                hashlib.sha256(
                    parent
                    + array("q", token_ids[start:end]).tobytes()
                    + msgspec.msgpack.encode(keys)
                ).digest()
            )
        return hashes

    def fork(self) -> PrefixHashes:
        """For a sequence that has the same tokens so far."""
        other = PrefixHashes(self._salt, self._keys)
        other._hashes = {size: list(hashes) for size, hashes in self._hashes.items()}
        return other
