"""Random numbers that depend on a sequence's seed and position only, not on the batch or on what was drawn before."""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's output function (Steele, Lea and Flood 2014), elementwise on uint64."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def uniform(seeds: np.ndarray, positions: np.ndarray, stream: int = 0) -> np.ndarray:
    """One number in [0, 1) per row, float64: a hash of (seed [R] uint64, position [R], stream).

    A counter in place of a generator's state: a sequence draws the same numbers after a preemption, on another rank, in another batch.
    """
    counters = positions.astype(np.uint64) * _GOLDEN + np.uint64(stream)
    bits = _mix(_mix(seeds + _GOLDEN) ^ _mix(counters + _MIX_1))
    numbers: np.ndarray = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers
