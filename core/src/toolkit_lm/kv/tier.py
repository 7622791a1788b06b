"""KVTier and KVTierStore: the two halves of a place for KV blocks beside the device. Needs no
torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Protocol

from toolkit_lm.config import VllmConfig
from toolkit_lm.kv.layout import KVCacheConfig
from toolkit_lm.messages import TierKey

Data = bytes | bytearray | memoryview


class KVTier:
    """The half in the scheduler: which contents of blocks the tier has. One per engine, called from
    its thread; its module imports no torch.

    A digest names what a block holds: all tokens up to its end, and what else its keys and values
    depend on. It does not name the model's weights: a tier that outlives its engine must.
    """

    timeout: ClassVar[float] = 10.0
    """Seconds after which blocks that have not come are computed instead."""

    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig, *, options: Any) -> None:
        """`config` is resolved. `kv_cache`: the groups that blocks belong to. `options`: the
        plugin's own, or None."""

    def find(self, group: int, digests: Sequence[bytes]) -> int:
        """How many of these blocks of a KV group it has, counted from the first to the first that
        it has not. Asked of each request that waits: it must not wait for anything."""
        return 0

    def load(self, group: int, digests: Sequence[bytes]) -> None:
        """These, which `find` has counted, are asked of the worker's half now."""

    def failed(self, group: int, digests: Sequence[bytes]) -> None:
        """Some of these did not come, came damaged, or were perhaps never stored. The request
        computes them."""

    def evicted(self, contents: Sequence[tuple[int, bytes]]) -> Sequence[tuple[int, bytes]]:
        """The device needs the blocks that hold these: (group, digest) of each, without repeats, in
        the order in which it took them. Returns those that the worker's half is to store."""
        return ()

    def dropped(self) -> list[tuple[int, bytes]]:
        """(group, digest) of what the worker's half may forget, since the last call. Asked after
        `evicted`; it is forgotten before anything is stored."""
        return []

    def reset(self) -> None:
        """Nobody is to find anything any more."""


class BlockBytes(Protocol):
    """A block of the device: the pages of its group's layers, one after the other."""

    @property
    def num_bytes(self) -> int: ...

    def read_into(self, target: Data) -> None:
        """Copies it into host memory of `num_bytes` bytes."""

    def to_bytes(self) -> bytes:
        """A copy, with a checksum after it."""


class KVTierStore(ABC):
    """The half on the worker: it keeps bytes. One per worker, called from the thread that runs its
    steps."""

    checked: ClassVar[bool] = True
    """What it gives back is what `to_bytes` made, checksum included. False: `num_bytes` bytes, of
    memory that only this process writes."""

    @abstractmethod
    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig, *, options: Any) -> None:
        """`config` is the rank's. `kv_cache`: with the layers of this rank. `options`: the plugin's
        own, or None."""

    @abstractmethod
    def store(self, group: int, key: TierKey, block: BlockBytes) -> None:
        """Takes a copy of a block: it may be overwritten when this returns. What takes long after
        that belongs in a thread of the tier's own."""

    @abstractmethod
    def load(self, group: int, key: TierKey) -> Future[Data]:
        """The bytes that were stored under this key. The future fails where they are not there;
        bytes that are cut or damaged count as a failure. It must not wait."""

    def drop(self, group: int, key: TierKey) -> None:  # noqa: B027
        """Nobody will ask for it. Unknown ones are no error."""

    def close(self) -> None:  # noqa: B027
        """The engine ends."""
