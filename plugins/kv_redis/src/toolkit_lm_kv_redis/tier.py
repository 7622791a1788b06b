"""RedisTier: which blocks are in the store. Needs no torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import KVCacheConfig
from toolkit_lm_kv_tiers.identity import identity_of
from toolkit_lm_kv_tiers.limits import block_sizes, num_ranks, why_off
from toolkit_lm_kv_tiers.sealing import make_seal
from toolkit_lm_kv_tiers.share import Counts
from toolkit_lm_kv_tiers.writing import SeenTwice, WritingTier

from toolkit_lm_kv_redis.asking import Asker, Key
from toolkit_lm_kv_redis.limits import address_of, is_selective, key_file_of
from toolkit_lm_kv_redis.link import prefix_of

logger = logging.getLogger(__name__)


class RedisTier(WritingTier):
    """Blocks in the store: those that steps have filled, here and in other engines of the same
    identity. The server makes room by its own rules."""

    rate: ClassVar[float] = 2.5e8
    timeout: ClassVar[float] = 5.0

    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig, *, options: Any) -> None:
        super().__init__(config, kv_cache, options=options)
        self._asking = False
        self._sizes = block_sizes(kv_cache)
        if options is None or options.url is None:
            self.is_off = True
            return
        address = address_of(options.url)
        if (reason := why_off(kv_cache)) is not None:
            logger.warning("no KV blocks are kept in %s: %s", address, reason)
            self.is_off = True
            return
        seal = make_seal(
            identity_of(config, kv_cache, None, "kv_redis.url"), key_file_of(config, options)
        )
        if is_selective(config, options):
            self._seen = SeenTwice()
        self._asker = Asker(
            options, prefix_of(options, seal.identity), num_ranks(config), seal.name
        )

    def find(self, group: int, digests: Sequence[bytes]) -> int:
        count, is_asking = self._asker.find(group, digests)
        self._asking |= is_asking
        return count

    def is_asking(self) -> bool:
        asking, self._asking = self._asking, False
        return asking

    @property
    def is_down(self) -> bool:
        return not self._asker.is_up

    def failed(self, group: int, digests: Sequence[bytes]) -> None:
        self._asker.forget([(group, digest) for digest in digests])

    @property
    def _writes(self) -> bool:
        return self._asker.is_up

    def holds(self, key: Key) -> bool:
        return self._asker.is_known(key)

    def _add(self, contents: Sequence[Key]) -> Sequence[Key]:
        new = [key for key in contents if not self.holds(key)]
        self._asker.add(new)
        self.counts.stored_blocks += len(new)
        return new

    def reset(self) -> None:
        self._gone += self._asker.reset()

    def figures(self) -> Counts:
        self.counts.held_blocks = self._asker.num_present
        return self.counts

    def close(self) -> None:
        self._asker.close()
