"""KVTier and KVTierStore: the two halves of a KV tier, a place for KV blocks off the device. Needs
no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Literal, Protocol

from toolkit_lm.config import VllmConfig
from toolkit_lm.kv.layout import KVCacheConfig
from toolkit_lm.messages import TierKey

Data = bytes | bytearray | memoryview
Outcome = Literal["loaded", "failed", "late", "cancelled"]
"""End of a load. "late": its blocks have not arrived within `KVTier.timeout`. "cancelled": the
request has ended."""


class KVTier:
    """Scheduler half of a KV tier: knows which block contents the tier has. There is one per
    engine, called from its thread. Its module imports no torch.

    A digest identifies the contents of a block: all tokens up to its end, and what else its keys
    and values depend on. It does not cover the model's weights: a tier that outlives its engine
    must add them.
    """

    timeout: ClassVar[float] = 10.0
    """Seconds after which blocks that have not arrived are computed instead."""
    is_off = False
    """The constructor sets it where the engine is to run without the tier."""

    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig, *, options: Any) -> None:
        """`config` is resolved. `kv_cache`: the groups that blocks belong to. `options`: the
        plugin's own options, or None."""

    def find(self, group: int, digests: Sequence[bytes]) -> int:
        """Returns how many of a KV group's blocks the tier has, up to the first that it lacks.
        Called for each waiting request, so it must not block."""
        return 0

    def pays(self, num_bytes: int, seconds: float | None) -> bool:
        """Whether to load what `find` has counted. Computing it would take about `seconds`; None:
        nothing was computed yet."""
        return True

    def load(self, group: int, digests: Sequence[bytes]) -> None:
        """The worker half is now asked for these blocks, which `find` has counted."""

    def ended(self, num_bytes: int, seconds: float, outcome: Outcome) -> None:
        """A load of so many bytes has ended, that many seconds after it began."""

    def failed(self, group: int, digests: Sequence[bytes]) -> None:
        """Some of these blocks did not arrive, arrived damaged, or were never stored. The request
        computes them."""

    def evicted(self, contents: Sequence[tuple[int, bytes]]) -> Sequence[tuple[int, bytes]]:
        """The device is about to overwrite blocks with these contents: (group, digest) of each,
        without duplicates, in the order of eviction. Returns those that the worker half must
        store."""
        return ()

    def filled(self, contents: Sequence[tuple[int, bytes]]) -> Sequence[tuple[int, bytes]]:
        """Steps that have ended have filled blocks with these contents. Returns those that the
        worker half must store already now: the tier then has them when the engine ends."""
        return ()

    def dropped(self) -> list[tuple[int, bytes]]:
        """Returns (group, digest) of the contents that the worker half may forget, since the last
        call. Called after `evicted`, `filled` and `reset`. They are dropped before anything is
        stored."""
        return []

    def reset(self) -> None:
        """Forgets all contents: nothing must be found any more."""

    def close(self) -> None:
        """Called when the engine ends, after the last blocks were offered."""


class BlockBytes(Protocol):
    """A block of the device: the pages of its group's layers, one after the other."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def memory(self) -> Sequence[Data]:
        """The pages themselves, to be written to; empty on a device other than the CPU."""

    def read_into(self, target: Data) -> None:
        """Copies the block into host memory of `num_bytes` bytes."""

    def to_bytes(self) -> bytes:
        """Returns a copy of the block, followed by a checksum."""


class KVTierStore(ABC):
    """Worker half of a KV tier: stores bytes. There is one per worker, called from the thread that
    runs its steps."""

    checked: ClassVar[bool] = True
    """Loaded data are the bytes of `to_bytes`, with the checksum. False: they are `num_bytes`
    bytes, from memory that only this process writes."""

    @abstractmethod
    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig, *, options: Any) -> None:
        """`config` is the rank's. `kv_cache`: with the layers of this rank. `options`: the plugin's
        own options, or None."""

    @abstractmethod
    def store(self, group: int, key: TierKey, block: BlockBytes) -> None:
        """Copies a block, which may be overwritten as soon as this returns. Slow work belongs in a
        thread of the tier's own."""

    @abstractmethod
    def load(self, group: int, key: TierKey) -> Future[Data]:
        """Returns a future of the bytes stored under this key. It fails if they are missing.
        Truncated or damaged bytes count as a failure. The call must not block."""

    def fill(self, blocks: Sequence[tuple[int, TierKey, BlockBytes]]) -> int:
        """Fills blocks in place, each with what is stored under its group and key, as far as that
        needs no wait: a step calls it. Returns how many of the first are filled and checked; the
        others are loaded, whatever was written to them."""
        return 0

    def drop(self, group: int, key: TierKey) -> None:  # noqa: B027
        """Forgets a block, which will not be requested again. Unknown ones are accepted."""

    def close(self) -> None:  # noqa: B027
        """Called when the engine ends."""
