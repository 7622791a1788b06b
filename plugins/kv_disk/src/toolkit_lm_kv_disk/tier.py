"""HostTier and DiskTier: which blocks are in host memory and on disk. Needs no torch."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import KVCacheConfig, KVTier, Outcome

from toolkit_lm_kv_disk.folders import Lock, folder_of, make_room, of_rank
from toolkit_lm_kv_disk.identity import identity_of
from toolkit_lm_kv_disk.limits import block_sizes, disk_bytes, num_bytes, share_of_rank, why_off
from toolkit_lm_kv_disk.segments import RECORD_BYTES, Key, read_all
from toolkit_lm_kv_disk.share import Counts

logger = logging.getLogger(__name__)

_SMALL = 2**22
"""Bytes of a load that tells how long each takes; greater ones tell the rate."""
_NEW = 0.3
"""Weight of the newest measurement."""
_RETRY = 1.02
"""Factor by which the estimate gets better with each load that it forbids, so that one slow time
does not forbid all later ones."""
_LIVE = 0.8
"""Share of the bytes on disk that are found. The rest is for blocks that are not found any more,
whose segments are not written anew yet."""


class _Measured:
    """Seconds that loads take, as measured."""

    def __init__(self, rate: float) -> None:
        """`rate`: bytes per second, before any load."""
        self._rate = rate
        self._delay = 0.0

    def seconds(self, num_bytes: int) -> float:
        """Seconds that a load of so many bytes will take."""
        return self._delay + num_bytes / self._rate

    def observe(self, num_bytes: int, seconds: float) -> None:
        if num_bytes < _SMALL:
            self._delay += _NEW * (seconds - self._delay)
        else:
            rate = num_bytes / max(seconds - self._delay, 1e-6)
            self._rate += _NEW * (rate - self._rate)

    def doubt(self) -> None:
        """A load is not begun because of the estimate."""
        self._rate *= _RETRY
        self._delay /= _RETRY


class LruTier(KVTier):
    """Blocks within a budget of bytes per rank. The least recently used ones go first."""

    rate: ClassVar[float]
    """Bytes per second of loads, before any was measured."""

    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig, *, options: Any) -> None:
        self.counts = Counts()
        self._always = options is not None and options.loads == "always"
        self._measured = _Measured(self.rate)
        self._sizes = block_sizes(kv_cache)
        self._budget = 0
        self._held: OrderedDict[Key, None] = OrderedDict()
        """The longest unused first."""
        self._num_bytes = 0
        self._gone: list[Key] = []

    def find(self, group: int, digests: Sequence[bytes]) -> int:
        return sum(1 for _ in takewhile(lambda digest: (group, digest) in self._held, digests))

    def pays(self, num_bytes: int, seconds: float | None) -> bool:
        if seconds is None or self._always or self._measured.seconds(num_bytes) < seconds:
            return True
        self._measured.doubt()
        self._count("slower")
        return False

    def load(self, group: int, digests: Sequence[bytes]) -> None:
        for digest in digests:
            if (group, digest) in self._held:
                self._held.move_to_end((group, digest))

    def ended(self, num_bytes: int, seconds: float, outcome: Outcome) -> None:
        self._count(outcome)
        if outcome == "loaded":
            self.counts.loaded_bytes += num_bytes
            self.counts.load_seconds += seconds
        if outcome in ("loaded", "late"):
            self._measured.observe(num_bytes, seconds)

    def failed(self, group: int, digests: Sequence[bytes]) -> None:
        for digest in digests:
            self._remove((group, digest))

    def dropped(self) -> list[Key]:
        gone, self._gone = self._gone, []
        return gone

    def reset(self) -> None:
        self._gone += self._held
        self._held.clear()
        self._num_bytes = 0

    def figures(self) -> Counts:
        """The figures so far."""
        self.counts.held_blocks = len(self._held)
        self.counts.held_bytes = self._num_bytes
        return self.counts

    def _count(self, outcome: str) -> None:
        self.counts.loads[outcome] = self.counts.loads.get(outcome, 0) + 1

    def _bytes_of(self, key: Key) -> int:
        return self._sizes[key[0]] + RECORD_BYTES

    def _add(self, contents: Sequence[Key]) -> list[Key]:
        """Holds as many of these blocks as there is room for. Returns the new ones."""
        new: list[Key] = []
        room = self._budget
        for key in contents:
            if key in self._held:
                self._held.move_to_end(key)
            elif self._bytes_of(key) <= room:
                room -= self._bytes_of(key)
                new.append(key)
        self._num_bytes += sum(map(self._bytes_of, new))
        while self._num_bytes > self._budget:
            self._remove(next(iter(self._held)))
        self._held |= dict.fromkeys(new)
        self.counts.stored_blocks += len(new)
        return new

    def _remove(self, key: Key) -> None:
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


class DiskTier(LruTier):
    """Blocks on disk: all that steps have filled."""

    rate = 1e9

    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig, *, options: Any) -> None:
        super().__init__(config, kv_cache, options=options)
        self._lock: Lock | None = None
        if options is None or options.dir is None:
            self.is_off = True
            return
        if (reason := why_off(kv_cache)) is not None:
            logger.warning("no KV blocks are kept in %s: %s", options.dir, reason)
            self.is_off = True
            return
        base = Path(options.dir).expanduser()
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            identity = identity_of(config, kv_cache, base)
            folder = folder_of(options.dir, identity)
            self._lock = Lock(folder)
            budget = make_room(options.dir, folder, disk_bytes(options))
        except OSError as error:
            logger.warning("no KV blocks are kept in %s: %s", options.dir, error)
            self.is_off = True
            return
        self._budget = int(_LIVE * share_of_rank(config, budget))
        parallel = config.parallel
        ranks = range(parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
        # The ranks tell what is damaged.
        found = [read_all(of_rank(folder, rank), identity)[1] for rank in ranks]
        for places in found:
            self._gone += [key for key in places if not all(key in other for other in found)]
        for key in found[0]:
            if all(key in other for other in found) and key[0] < len(self._sizes):
                self._held[key] = None
                self._num_bytes += self._bytes_of(key)
        while self._num_bytes > self._budget and self._held:
            self._remove(next(iter(self._held)))
        logger.info("%s: %d KV blocks, %.1f MiB", folder, len(self._held), self._num_bytes / 2**20)

    def evicted(self, contents: Sequence[Key]) -> Sequence[Key]:
        return self.filled(contents)

    def filled(self, contents: Sequence[Key]) -> Sequence[Key]:
        return self._add(contents) if self._lock is not None and self._lock.is_held else ()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
