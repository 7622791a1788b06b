"""All pairs instead of all combinations: how a matrix of many factors is tested in few cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Case = dict[str, Any]


def all_pairs(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool] = lambda case: True, seed: int = 0) -> list[Case]:
    """Cases that cover, between them, each pair of values of any two factors that an allowed case can have (a greedy selection)."""
    rng = np.random.default_rng(seed)
    names = list(factors)

    def pairs(case: Case) -> frozenset[tuple[str, str, str, str]]:
        return frozenset((a, repr(case[a]), b, repr(case[b])) for n, a in enumerate(names) for b in names[n + 1 :])

    drawn = ({name: values[int(rng.integers(len(values)))] for name, values in factors.items()} for _ in range(3000))
    pool = [(case, pairs(case)) for case in drawn if allowed(case)]
    missing = set().union(*(covered for _, covered in pool))
    chosen = []
    while missing:
        best, covered = max(pool, key=lambda one: len(one[1] & missing))
        chosen.append(best)
        missing -= covered
    return chosen
