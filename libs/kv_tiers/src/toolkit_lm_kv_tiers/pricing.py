"""PricedTier: the scheduler's half of a tier that loads where it is faster, as measured. Needs no
torch."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import KVCacheConfig, KVTier, Outcome

from toolkit_lm_kv_tiers.share import Counts

Key = tuple[int, bytes]
"""KV group and digest of a block, or its name."""
_SMALL = 2**22
"""Bytes of a load that tells how long each takes; greater ones tell the rate."""
_NEW = 0.3
"""Weight of the newest measurement."""
_RETRY = 1.02
"""Factor by which the estimate gets better with each load that it forbids, so that one slow time
does not forbid all later ones."""


class Measured:
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


class PricedTier(KVTier):
    """Loads are begun where they are expected to be faster than computing. Counts them all."""

    rate: ClassVar[float]
    """Bytes per second of loads, before any was measured."""

    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig, *, options: Any) -> None:
        self.counts = Counts()
        self._gone: list[Key] = []
        """Blocks that the worker's half may forget."""
        self._always = options is not None and options.loads == "always"
        self._measured = Measured(self.rate)

    def pays(self, num_bytes: int, seconds: float | None) -> bool:
        if seconds is None or self._always or self._measured.seconds(num_bytes) < seconds:
            return True
        self._measured.doubt()
        self.count("slower")
        return False

    def ended(self, num_bytes: int, seconds: float, outcome: Outcome) -> None:
        self.count(outcome)
        if outcome == "loaded":
            self.counts.loaded_bytes += num_bytes
            self.counts.load_seconds += seconds
        if outcome in ("loaded", "late"):
            self._measured.observe(num_bytes, seconds)

    def dropped(self) -> list[Key]:
        gone, self._gone = self._gone, []
        return gone

    def figures(self) -> Counts:
        """The figures so far."""
        return self.counts

    def count(self, outcome: str) -> None:
        """Counts the end of a load."""
        self.counts.loads[outcome] = self.counts.loads.get(outcome, 0) + 1

    def missed(self, reason: str) -> None:
        """A request was admitted whose prefix the tier could not make longer. `reason`: see
        `Counts.misses`."""
        self.counts.misses[reason] = self.counts.misses.get(reason, 0) + 1

    @property
    def is_down(self) -> bool:
        """Whether the tier cannot be asked at present."""
        return False

    def hit(self, group: int, digest: bytes) -> None:
        """A request has found a block on the device that another one has filled."""

    def wants(self, group: int, digest: bytes) -> bool:
        """Whether the tier lacks a block that `hit` has named, and would store it if it were
        offered."""
        return False

    def is_asking(self) -> bool:
        """Whether the last calls of `find` have not counted blocks that the tier may have: it is
        still asking. The request waits meanwhile."""
        return False
