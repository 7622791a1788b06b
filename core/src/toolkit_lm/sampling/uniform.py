"""Random numbers that depend on a sequence's seed and position only, not on the batch or on what
was drawn before."""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x: np.ndarray, spare: np.ndarray) -> np.ndarray:
    """SplitMix64's output function (Steele, Lea and Flood 2014), elementwise on uint64, in
    place."""
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
        x ^= np.right_shift(x, np.uint64(shift), out=spare)
        x *= np.uint64(factor)
    return x


def uniform(
    seeds: np.ndarray, positions: np.ndarray, stream: int = 0, *, work: np.ndarray | None = None
) -> np.ndarray:
    """One number in [0, 1) per row, float64: a hash of (seed [R] uint64, position [R], stream).

    A counter in place of a generator's state: a sequence draws the same numbers after a preemption,
    on another rank, in another batch. `work`: [3, R or more] uint64, overwritten; the result is a
    view of it. None: new memory.
    """
    bits, counters, spare = (np.empty((3, len(seeds)), np.uint64) if work is None else work)[
        :, : len(seeds)
    ]
    np.copyto(counters, positions, casting="unsafe")
    counters *= _GOLDEN
    counters += np.uint64(stream) + _MIX_1
    _mix(np.add(seeds, _GOLDEN, out=bits), spare)
    bits ^= _mix(counters, spare)
    np.right_shift(_mix(bits, spare), np.uint64(11), out=bits)
    numbers: np.ndarray = counters.view(np.float64)
    np.multiply(bits, 2.0**-53, out=numbers)
    return numbers
