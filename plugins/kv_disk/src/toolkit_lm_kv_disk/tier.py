"""HostTier and DiskTier: which blocks are in host memory and on disk. Needs no torch."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import KVCacheConfig
from toolkit_lm_kv_tiers.identity import identity_of
from toolkit_lm_kv_tiers.limits import block_sizes, num_bytes, num_ranks, share_of_rank, why_off
from toolkit_lm_kv_tiers.pricing import PricedTier
from toolkit_lm_kv_tiers.sealing import Seal, make_seal
from toolkit_lm_kv_tiers.share import Counts
from toolkit_lm_kv_tiers.writing import SeenTwice, WritingTier

from toolkit_lm_kv_disk.folders import Lock, folder_of, make_room, of_rank
from toolkit_lm_kv_disk.limits import disk_bytes
from toolkit_lm_kv_disk.named import NamedPrefixes
from toolkit_lm_kv_disk.segments import RECORD_BYTES, Key, read_all
from toolkit_lm_kv_disk.share import OnDisk, Prefix, Prefixes

logger = logging.getLogger(__name__)

_LIVE = 0.8
"""Share of the bytes on disk that are found. The rest is for blocks that are not found any more,
whose segments are not written anew yet."""
_NAMED = 0.25
"""Largest share of the bytes that are found that named prefixes have."""


class LruTier(PricedTier):
    """Blocks within a budget of bytes per rank. The least recently used ones go first."""

    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig, *, options: Any) -> None:
        super().__init__(config, kv_cache, options=options)
        self._seal = Seal(b"")
        self._sizes = block_sizes(kv_cache)
        self._budget = 0
        self._held: OrderedDict[Key, None] = OrderedDict()
        """By name of the seal. The longest unused first."""
        self._num_bytes = 0

    def find(self, group: int, digests: Sequence[bytes]) -> int:
        held = self._held
        name = self._seal.name
        return sum(1 for _ in takewhile(lambda digest: (group, name(digest)) in held, digests))

    def load(self, group: int, digests: Sequence[bytes]) -> None:
        for digest in digests:
            if (name := self._name((group, digest))) in self._held:
                self._held.move_to_end(name)

    def failed(self, group: int, digests: Sequence[bytes]) -> None:
        for digest in digests:
            self._remove(self._name((group, digest)))

    def reset(self) -> None:
        self._gone += self._held
        self._held.clear()
        self._num_bytes = 0

    def drop(self, names: Collection[Key], name_of: Callable[[Key], Key] | None = None) -> None:
        """Forgets blocks with these names. `name_of`: gives them, where they are not the tier's
        own."""
        for key in [key for key in self._held if (name_of(key) if name_of else key) in names]:
            self._remove(key)

    def figures(self) -> Counts:
        self.counts.held_blocks = len(self._held)
        self.counts.held_bytes = self._num_bytes
        return self.counts

    def _name(self, key: Key) -> Key:
        """The block's name, under which it is held."""
        return key[0], self._seal.name(key[1])

    def _bytes_of(self, key: Key) -> int:
        return self._sizes[key[0]] + RECORD_BYTES + self._seal.overhead

    def _add(self, contents: Sequence[Key]) -> list[Key]:
        """Holds as many of these blocks as there is room for. Returns the new ones."""
        new: list[Key] = []
        room = self._budget - self._staying
        for key in contents:
            if (name := self._name(key)) in self._held:
                self._held.move_to_end(name)
            elif self._stays(name):
                new.append(key)
            elif self._bytes_of(key) <= room:
                room -= self._bytes_of(key)
                new.append(key)
        self._num_bytes += sum(map(self._bytes_of, new))
        self._evict()
        self._held |= dict.fromkeys(map(self._name, new))
        self.counts.stored_blocks += len(new)
        return new

    @property
    def _staying(self) -> int:
        """Bytes of blocks that are not evicted."""
        return 0

    def _stays(self, name: Key) -> bool:
        """Whether a block is not evicted."""
        return False

    def _evict(self) -> None:
        """Drops the longest unused blocks beyond the budget, but for those that stay."""
        while self._num_bytes > self._budget and self._held:
            name = next(iter(self._held))
            if self._stays(name):
                self._held.move_to_end(name)
            else:
                self._remove(name)

    def _remove(self, key: Key) -> None:
        """Forgets a block, by its name."""
        if key in self._held:
            del self._held[key]
            self._num_bytes -= self._bytes_of(key)
            self._gone.append(key)


class HostTier(LruTier):
    """Blocks in host memory: those that the device evicts."""

    rate = 4e9

    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig, *, options: Any) -> None:
        super().__init__(config, kv_cache, options=options)
        if options is None or options.host is None or why_off(kv_cache) is not None:
            self.is_off = True
            return
        self._budget = share_of_rank(config, num_bytes("host", options.host))

    def evicted(self, contents: Sequence[Key]) -> Sequence[Key]:
        return self._add(contents)


class DiskTier(LruTier, WritingTier):
    """Blocks on disk: all that steps have filled, or those of them that were seen twice."""

    rate = 1e9

    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig, *, options: Any) -> None:
        super().__init__(config, kv_cache, options=options)
        self._lock: Lock | None = None
        self._named: NamedPrefixes | None = None
        if options is None or options.dir is None:
            self.is_off = True
            return
        if options.write == "selective":
            self._seen = SeenTwice()
        if (reason := why_off(kv_cache)) is not None:
            logger.warning("no KV blocks are kept in %s: %s", options.dir, reason)
            self.is_off = True
            return
        base = Path(options.dir).expanduser()
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            identity = identity_of(config, kv_cache, base, "kv_disk.dir")
            self._seal = make_seal(identity, options.key_file)
            folder = folder_of(options.dir, self._seal.identity)
            self._lock = Lock(folder)
            budget = make_room(options.dir, folder, disk_bytes(options))
        except OSError as error:
            logger.warning("no KV blocks are kept in %s: %s", options.dir, error)
            self.is_off = True
            return
        self._budget = int(_LIVE * share_of_rank(config, budget))
        self._named = NamedPrefixes(
            folder, int(_NAMED * self._budget), self._bytes_of, writes=self._writes
        )
        self._place = OnDisk(str(folder), self._seal.identity, num_ranks(config), [])
        # The ranks tell what is damaged.
        found = [
            read_all(of_rank(folder, rank), self._seal.identity)[1]
            for rank in range(num_ranks(config))
        ]
        for places in found:
            self._gone += [key for key in places if not all(key in other for other in found)]
        for key in found[0]:
            if all(key in other for other in found) and key[0] < len(self._sizes):
                self._held[key] = None
                self._num_bytes += self._bytes_of(key)
        self._evict()
        logger.info("%s: %d KV blocks, %.1f MiB", folder, len(self._held), self._num_bytes / 2**20)

    @property
    def _writes(self) -> bool:
        """Whether no other engine writes to the folder."""
        return self._lock is not None and self._lock.is_held

    # Named prefixes

    def _stays(self, name: Key) -> bool:
        return self._named is not None and name in self._named

    @property
    def _staying(self) -> int:
        return 0 if self._named is None else self._named.num_bytes

    def expect(self, keys: Sequence[Key]) -> None:
        """These blocks are to be stored, seen before or not."""
        if self._seen is not None:
            for key in keys:
                self._seen.found(key)

    def holds(self, key: Key) -> bool:
        """Whether the tier has a block."""
        return self._name(key) in self._held

    def name_of(self, key: Key) -> Key:
        """The name of a block on disk."""
        return self._name(key)

    def name_prefix(self, name: str, num_tokens: int, salt: str, keys: Sequence[Key]) -> str | None:
        """Names a prefix, whose blocks are not evicted from now on. Returns why it cannot be
        named."""
        assert self._named is not None, "a tier that is on has names"
        return self._named.add(name, num_tokens, salt, [*map(self._name, keys)])

    def drop_names(self, names: Sequence[str]) -> list[Key]:
        """Forgets names. Returns the names of the blocks that are in no named prefix any more.
        Raises OSError."""
        assert self._named is not None, "a tier that is on has names"
        return self._named.drop(names)

    def named_prefixes(self) -> Prefixes:
        """The named prefixes."""
        assert self._named is not None, "a tier that is on has names"
        found = [
            Prefix(
                name,
                entry.created,
                entry.num_tokens,
                sum(map(self._bytes_of, entry.keys)),
                all(key in self._held for key in entry.keys),
                entry.salt,
            )
            for name, entry in sorted(self._named.entries.items())
        ]
        return Prefixes(found, self._named.num_bytes, self._named.most_bytes)

    def place_of(self, name: str) -> OnDisk | None:
        """Places of the blocks of a named prefix; None: there is none of this name."""
        assert self._named is not None, "a tier that is on has names"
        entry = self._named.entries.get(name)
        place = self._place
        if entry is None:
            return None
        return OnDisk(place.folder, place.identity, place.num_ranks, entry.keys)

    def reset(self) -> None:
        super().reset()
        if self._named is None:
            return
        try:
            self._named.drop(list(self._named.entries))
        except OSError as error:
            logger.warning("the names of prefixes cannot be dropped from disk: %s", error)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
