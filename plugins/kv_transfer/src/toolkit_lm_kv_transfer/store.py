"""TransferStore: a rank's blocks that wait for peers, and those that it fetches."""

from __future__ import annotations

import time
import weakref
from concurrent.futures import Future
from typing import Any, ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import BlockBytes, Data, KVCacheConfig, KVTierStore
from toolkit_lm.messages import TierKey
from toolkit_lm_kv_tiers.identity import identity_of
from toolkit_lm_kv_tiers.limits import block_sizes, share_of_rank, why_off

from toolkit_lm_kv_transfer.client import Client, Patience
from toolkit_lm_kv_transfer.held import Held
from toolkit_lm_kv_transfer.server import Server
from toolkit_lm_kv_transfer.settings import (
    first_port,
    memory_of,
    parse,
    peers_of,
    read_secret,
)
from toolkit_lm_kv_transfer.share import News, RankCounts

_STORES: weakref.WeakSet[TransferStore] = weakref.WeakSet()
"""All stores of this process."""


class TransferStore(KVTierStore):
    """Blocks are sent and fetched by threads beside the steps."""

    checked: ClassVar[bool] = False
    """The threads compute and compare checksums, so that steps need not."""

    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig, *, options: Any) -> None:
        """Opens the sockets. Raises ConfigError."""
        self.options = options
        self.rank = config.parallel.rank
        self._counts = RankCounts()
        self._held: Held | None = None
        self._server: Server | None = None
        self._client: Client | None = None
        peers = peers_of(options) if options is not None else []
        if options is None or (options.listen is None and not peers):
            return
        if why_off(kv_cache) is not None:
            # The scheduler's half has said why.
            return
        secret = read_secret(options)
        identity = identity_of(config, kv_cache, None, "kv_transfer")
        if options.listen is not None:
            address = first_port(config, parse("listen", options.listen)).plus(self.rank)
            self._held = Held(share_of_rank(config, memory_of(options)), options.lease)
            self._server = Server(address, secret, identity, self._held, self._counts)
        if peers:
            ranks = [peer.plus(self.rank) for peer in peers]
            sizes = block_sizes(kv_cache)
            patience = Patience(options.timeout, options.lease)
            self._client = Client(ranks, secret, identity, sizes, patience, self._counts)
        _STORES.add(self)

    def store(self, group: int, key: TierKey, block: BlockBytes) -> None:
        assert isinstance(key, bytes), "blocks are stored by digest"
        if self._held is None or self._server is None:
            return
        now = time.monotonic()
        if not self._held.renew((group, key), now):
            room = self._held.make_room(block.num_bytes)
            if room is None:
                return
            try:
                block.read_into(room.data)
            except BaseException:
                self._held.free(room)
                raise
            self._held.put((group, key), room, now)
        self._server.stored((group, key))

    def hear(self, news: News) -> None:
        """Passes on what the planner tells."""
        if self._server is not None and (news.begun or news.ended):
            self._server.hear(news)
        if self._client is not None and news.early:
            self._client.expect(news.early)

    def load(self, group: int, key: TierKey) -> Future[Data]:
        assert isinstance(key, bytes), "blocks are loaded by digest"
        if self._client is None:
            raise KeyError("there are no peers")
        return self._client.fetch((group, key))

    def drop(self, group: int, key: TierKey) -> None:
        assert isinstance(key, bytes), "blocks are stored by digest"
        if self._held is not None:
            self._held.drop((group, key))

    def close(self) -> None:
        _STORES.discard(self)
        for end in (self._server, self._client):
            if end is not None:
                end.close()

    def counts(self) -> RankCounts:
        """The figures so far."""
        if self._held is not None:
            self._counts.held_blocks = len(self._held)
            self._counts.held_bytes = self._held.num_bytes
            self._counts.expired_blocks = self._held.num_expired
        return self._counts


def store_of(options: Any, rank: int) -> TransferStore | None:
    """The store of an engine in this process, which is known by its options."""
    return next((s for s in [*_STORES] if s.options is options and s.rank == rank), None)
