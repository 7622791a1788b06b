"""RedisStore: a rank's blocks in the store."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar, Generic, TypeVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import BlockBytes, Data, KVCacheConfig, KVTierStore
from toolkit_lm.messages import TierKey
from toolkit_lm_kv_tiers.identity import identity_of
from toolkit_lm_kv_tiers.limits import block_sizes, why_off
from toolkit_lm_kv_tiers.pending import Pending
from toolkit_lm_kv_tiers.sealing import make_seal
from toolkit_lm_kv_tiers.stores import remember

from toolkit_lm_kv_redis.frames import FRAME_BYTES, pack, unpack
from toolkit_lm_kv_redis.limits import key_file_of
from toolkit_lm_kv_redis.link import Breaker, connect, key_of, prefix_of
from toolkit_lm_kv_redis.tier import RedisTier

logger = logging.getLogger(__name__)

_BATCH = 2**24
"""Most bytes of blocks that are asked for, or written, at once, but for a single block."""
_SILENCE = 2.0
"""Most seconds that the server may be silent."""
_CLOSING = 10.0
"""Most seconds that the end waits for what is still to be written."""

Name = tuple[int, bytes]
"""KV group of a block, and its name."""
Work = TypeVar("Work")


class _Turns(Generic[Work]):
    """A thread that works on what is put, in order, as much at once as `_BATCH` allows."""

    def __init__(self, name: str, run: Callable[[list[Work]], None]) -> None:
        self.changed = threading.Condition()
        self._work: deque[tuple[int, Work]] = deque()
        self._run = run
        self._ends = False
        self._thread = threading.Thread(target=self._all, name=name, daemon=True)
        self._thread.start()

    def put(self, num_bytes: int, work: Work) -> None:
        with self.changed:
            self._work.append((num_bytes, work))
            self.changed.notify()

    def close(self, seconds: float) -> bool:
        """Works on what is left, for so long at most. Returns whether it has ended."""
        with self.changed:
            self._ends = True
            self.changed.notify()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _all(self) -> None:
        while True:
            with self.changed:
                while not self._work:
                    if self._ends:
                        return
                    self.changed.wait()
                taken = [self._work.popleft()]
                total = taken[0][0]
                while self._work and total + self._work[0][0] <= _BATCH:
                    total += self._work[0][0]
                    taken.append(self._work.popleft())
            self._run([work for _, work in taken])


class _Load:
    """A block that is asked for."""

    def __init__(self, name: Name) -> None:
        self.name = name
        self.began = time.monotonic()
        self.future: Future[Data] = Future()


class RedisStore(KVTierStore):
    """A thread writes blocks behind the steps, another one loads them. What waits to be written is
    found too."""

    checked: ClassVar[bool] = False
    """The threads compute and compare checksums, so that steps need not. They encrypt, too."""
    tier: ClassVar[str] = "kv_redis"

    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig, *, options: Any) -> None:
        self.num_lost = 0
        """Blocks that were not written, for lack of time or room, or of an answer."""
        self.options = options
        remember(self)
        self._is_on = options is not None and options.url is not None and not why_off(kv_cache)
        if not self._is_on:
            return
        self._seal = make_seal(
            identity_of(config, kv_cache, None, "kv_redis.url"), key_file_of(config, options)
        )
        self._rank = config.parallel.rank
        self._prefix = prefix_of(options, self._seal.identity)
        self._sizes = [size + self._seal.overhead + FRAME_BYTES for size in block_sizes(kv_cache)]
        self._ttl: int | None = options.ttl or None
        self._pending = Pending()
        """Blocks that wait to be written."""
        self._reads = connect(options, _SILENCE)
        self._writes = connect(options, _SILENCE)
        self._may_read = Breaker(f"{options.url}: no KV blocks are loaded")
        self._may_write = Breaker(f"{options.url}: no KV blocks are written")
        self._loading = _Turns[_Load]("kv_redis load", self._load_all)
        self._writing = _Turns[tuple[Name, bytearray | None]]("kv_redis write", self._write_all)

    def store(self, group: int, key: TierKey, block: BlockBytes) -> None:
        assert isinstance(key, bytes), "blocks are stored by digest"
        if not self._is_on:
            return
        name = (group, self._seal.name(key))
        if self._may_write.is_open or (data := self._pending.add(name, block)) is None:
            self.num_lost += 1
            return
        self._writing.put(len(data), (name, data))

    def load(self, group: int, key: TierKey) -> Future[Data]:
        assert isinstance(key, bytes), "blocks are stored by digest"
        if not self._is_on:
            raise KeyError("nothing is stored")
        load = _Load((group, self._seal.name(key)))
        if (data := self._pending.find(load.name)) is not None:
            load.future.set_result(data)
        elif self._may_read.is_open:
            raise KeyError("the store does not answer")
        else:
            self._loading.put(self._sizes[group], load)
        return load.future

    def drop(self, group: int, key: TierKey) -> None:
        assert isinstance(key, bytes), "blocks are stored by digest"
        if not self._is_on:
            return
        name = (group, self._seal.name(key))
        self._pending.drop(name)
        self._writing.put(0, (name, None))

    def close(self) -> None:
        """Writes what is still to be written."""
        if not self._is_on:
            return
        if self._writing.close(_CLOSING):
            self._writes.close()
        if self._loading.close(_SILENCE):
            self._reads.close()

    def _key(self, name: Name) -> str:
        return key_of(self._prefix, self._rank, *name)

    def _write_all(self, blocks: list[tuple[Name, bytearray | None]]) -> None:
        """Writes blocks, and drops those without data. What cannot be written is lost."""
        written = [
            (name, data)
            for name, data in blocks
            # It was dropped, or stored again.
            if data is None or self._pending.is_wanted(name, data)
        ]
        num_blocks = sum(data is not None for _, data in written)
        if self._may_write.is_open:
            self.num_lost += num_blocks
        else:
            try:
                answers = self._write(written)
            except Exception as error:
                self.num_lost += num_blocks
                self._may_write.failed(error)
            else:
                errors = [answer for answer in answers if isinstance(answer, Exception)]
                self.num_lost += min(len(errors), num_blocks)
                if errors:
                    # Such as that the server is full.
                    self._may_write.failed(errors[0])
                else:
                    self._may_write.worked()
        for name, data in blocks:
            if data is not None:
                self._pending.done(name, data)

    def _write(self, blocks: list[tuple[Name, bytearray | None]]) -> list[Any]:
        """Returns the server's answers. Raises what redis raises."""
        with self._writes.pipeline(transaction=False) as pipe:
            for name, data in blocks:
                key = self._key(name)
                if data is None:
                    pipe.unlink(key)
                else:
                    about = self._seal.about(self._rank, name)
                    value = pack(key, self._seal.close(data, about))
                    pipe.set(key, value, ex=self._ttl)
            found: list[Any] = pipe.execute(raise_on_error=False)
        return found

    def _load_all(self, loads: list[_Load]) -> None:
        """Loads blocks. Each that does not come is a miss."""
        # Nobody waits for the others any more.
        loads = [load for load in loads if time.monotonic() - load.began < RedisTier.timeout]
        try:
            if self._may_read.is_open:
                raise KeyError("the store does not answer")
            values = self._read(loads)
        except Exception as error:
            if not isinstance(error, KeyError):
                self._may_read.failed(error)
            for load in loads:
                load.future.set_exception(error)
            return
        self._may_read.worked()
        for load, value in zip(loads, values, strict=True):
            try:
                data = unpack(self._key(load.name), value)
                about = self._seal.about(self._rank, load.name)
                load.future.set_result(self._seal.open(bytearray(data), about))
            except Exception as error:
                load.future.set_exception(error)

    def _read(self, loads: list[_Load]) -> list[Any]:
        """Returns the values, or the error of each. Raises what redis raises."""
        with self._reads.pipeline(transaction=False) as pipe:
            for load in loads:
                # No more than a block has, whatever is there.
                pipe.getrange(self._key(load.name), 0, self._sizes[load.name[0]])
            if self._ttl is not None:
                for load in loads:
                    pipe.expire(self._key(load.name), self._ttl)
            found: list[Any] = pipe.execute(raise_on_error=False)
        return found[: len(loads)]
