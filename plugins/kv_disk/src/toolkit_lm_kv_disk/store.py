"""DiskStore: a rank's blocks on disk."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import BlockBytes, Data, KVCacheConfig, KVTierStore
from toolkit_lm.messages import TierKey
from toolkit_lm_kv_tiers.identity import identity_of
from toolkit_lm_kv_tiers.limits import block_sizes, share_of_rank, why_off
from toolkit_lm_kv_tiers.pending import Pending
from toolkit_lm_kv_tiers.sealing import Seal, make_seal
from toolkit_lm_kv_tiers.stores import remember

from toolkit_lm_kv_disk.filling import Filler, Target
from toolkit_lm_kv_disk.folders import Lock, folder_of, make_room, of_rank
from toolkit_lm_kv_disk.limits import disk_bytes
from toolkit_lm_kv_disk.log import SegmentLog
from toolkit_lm_kv_disk.reading import BlockReader
from toolkit_lm_kv_disk.segments import Key

logger = logging.getLogger(__name__)

_CLOSING = 60.0
"""Most seconds that the end waits for what is still to be written."""


class DiskStore(KVTierStore):
    """Blocks are written by a thread behind the steps, and read by others. What waits to be
    written is found too."""

    checked: ClassVar[bool] = False
    """The threads compute and compare checksums, so that steps need not. They encrypt, too."""
    tier: ClassVar[str] = "kv_disk"

    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig, *, options: Any) -> None:
        self.num_lost = 0
        """Blocks that were not written, for lack of time or room."""
        self.options = options
        remember(self)
        self._log: SegmentLog | None = None
        self._lock: Lock | None = None
        if options is None or options.dir is None or why_off(kv_cache) is not None:
            return
        try:
            self._open(config, kv_cache, options)
        except OSError:
            # The scheduler's half has said why.
            return
        self._pending = Pending()
        """Blocks that wait to be written, by name of the seal."""
        self._work: deque[tuple[Key, bytearray | None]] = deque()
        """What is to be written, in order. None: the block is to be dropped."""
        self._changed = threading.Condition()
        self._ends = False
        self._has_failed = False
        self._reader = BlockReader(
            self._open_block, max(block_sizes(kv_cache), default=0) + self._seal.overhead
        )
        self._filler = Filler()
        self._writer = threading.Thread(target=self._write_all, name="kv_disk write", daemon=True)
        self._writer.start()

    def _open(self, config: VllmConfig, kv_cache: KVCacheConfig, options: Any) -> None:
        """Raises OSError for a folder that cannot be used."""
        base = Path(options.dir).expanduser()
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        identity = identity_of(config, kv_cache, base, "kv_disk.dir")
        self._seal: Seal = make_seal(identity, options.key_file)
        folder = folder_of(options.dir, self._seal.identity)
        folder.mkdir(mode=0o700, exist_ok=True)
        place = of_rank(folder, config.parallel.rank)
        self._rank = config.parallel.rank
        self._lock = Lock(place)
        if not self._lock.is_held:
            logger.warning("%s: another engine writes here, and this one only reads", place)
        self._log = SegmentLog(
            place,
            self._seal.identity,
            share_of_rank(config, make_room(options.dir, folder, disk_bytes(options))),
            {group: size + self._seal.overhead for group, size in enumerate(block_sizes(kv_cache))},
            writes=self._lock.is_held,
        )

    def store(self, group: int, key: TierKey, block: BlockBytes) -> None:
        assert isinstance(key, bytes), "blocks are stored by digest"
        if self._log is None or self._lock is None or not self._lock.is_held:
            return
        name = (group, self._seal.name(key))
        if (data := self._pending.add(name, block)) is None:
            self.num_lost += 1
            return
        with self._changed:
            self._work.append((name, data))
            self._changed.notify()

    def load(self, group: int, key: TierKey) -> Future[Data]:
        assert isinstance(key, bytes), "blocks are stored by digest"
        if self._log is None:
            raise KeyError("nothing is stored")
        name = (group, self._seal.name(key))
        # Written blocks are in the log before they cease to wait.
        data = self._pending.find(name)
        if data is None:
            if (place := self._log.index.get(name)) is None:
                raise KeyError("the block was not stored")
            return self._reader.read(name, place)
        future: Future[Data] = Future()
        future.set_result(data)
        return future

    def fill(self, blocks: Sequence[tuple[int, TierKey, BlockBytes]]) -> int:
        """Reads written blocks that the system's page cache has. Sealed ones are loaded."""
        if self._log is None or self._seal.overhead:
            return 0
        targets = []
        for group, key, block in blocks:
            assert isinstance(key, bytes), "blocks are stored by digest"
            name = (group, self._seal.name(key))
            place = None if name in self._pending else self._log.index.get(name)
            if place is None:
                break
            targets.append(Target(place, block))
        return self._filler.fill(targets)

    def drop(self, group: int, key: TierKey) -> None:
        assert isinstance(key, bytes), "blocks are stored by digest"
        if self._log is None or self._lock is None or not self._lock.is_held:
            return
        # The scheduler's half names those of former engines, whose digests it does not know.
        names = dict.fromkeys([key, self._seal.name(key)])
        with self._changed:
            for name in names:
                self._pending.drop((group, name))
                self._work.append(((group, name), None))
            self._changed.notify()

    def close(self) -> None:
        """Writes what is still to be written."""
        if self._log is None or self._lock is None:
            return
        with self._changed:
            self._ends = True
            self._changed.notify()
        self._writer.join(_CLOSING)
        self._reader.close()
        self._filler.close()
        if not self._writer.is_alive():
            self._lock.close()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                while not self._work:
                    if self._ends:
                        return
                    self._changed.wait()
                key, data = self._work.popleft()
            try:
                if data is None or self._pending.is_wanted(key, data):
                    self._write(key, data)
            except Exception as error:
                self.num_lost += 1
                if not self._has_failed:
                    logger.warning("KV blocks cannot be written to disk: %s", error)
                self._has_failed = True
            if data is not None:
                self._pending.done(key, data)

    def _write(self, key: Key, data: bytearray | None) -> None:
        assert self._log is not None, "there is no thread without a log"
        if data is None:
            self._log.drop(key)
        elif key not in self._log.index and not self._log.append(
            key, self._seal.close(data, self._seal.about(self._rank, key))
        ):
            self.num_lost += 1

    def _open_block(self, name: Key, data: memoryview) -> Data:
        """Bytes of a block. Raises SealError."""
        return self._seal.open(data, self._seal.about(self._rank, name))
