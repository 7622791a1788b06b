"""Hashes of KV cache blocks. Each covers all tokens up to the block's end."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import msgspec

from toolkit_lm.messages import CacheKey


class PrefixHashes:
    """Hashes of a sequence's full blocks (SHA-256, so that collisions cannot be constructed).

    Each covers the previous hash, the block's tokens, and what else their keys and values depend
    on. The first one covers `salt`, which identifies the plugin set.
    """

    def __init__(self, salt: str, keys: Sequence[CacheKey] = ()) -> None:
        self._salt = salt
        self._keys = keys
        self._hashes: dict[int, list[bytes]] = {}
        """Hashes by block size."""

    def block_hashes(
        self, token_ids: Sequence[int], block_size: int, num_blocks: int
    ) -> list[bytes]:
        """Returns at least the first `num_blocks` hashes of blocks of this size. Since the last
        call, tokens may have been appended, but not changed."""
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
        """Returns the hashes for a sequence that has the same tokens so far."""
        other = PrefixHashes(self._salt, self._keys)
        other._hashes = {size: list(hashes) for size, hashes in self._hashes.items()}
        return other
