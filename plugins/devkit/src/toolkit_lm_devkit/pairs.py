"""All pairs instead of all combinations: how a matrix of many factors is tested in few cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Case = dict[str, Any]


def all_pairs(
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[Case], bool] = lambda case: True,
    seed: int = 0,
) -> list[Case]:
    """Cases that cover, between them, each pair of values of any two factors that an allowed case
    can have (a greedy selection).

    A factor's first value is the plain one: a third of the cases that are drawn have most factors
    plain, so that pairs are found too where little else is allowed.
    """
    rng = np.random.default_rng(seed)
    names = list(factors)

    def pairs(case: Case) -> frozenset[tuple[str, str, str, str]]:
        return frozenset(
            (a, repr(case[a]), b, repr(case[b]))
            for n, a in enumerate(names)
            for b in names[n + 1 :]
        )

    def draw(values: Sequence[Any], plain: float) -> Any:
        return values[0] if rng.random() < plain else values[int(rng.integers(len(values)))]

    odds = [0.0, 0.0, 0.6] * 1000
    drawn = ({name: draw(values, plain) for name, values in factors.items()} for plain in odds)
    pool = [(case, pairs(case)) for case in drawn if allowed(case)]
    missing = set().union(*(covered for _, covered in pool))
    chosen = []
    while missing:
        best, covered = max(pool, key=lambda pair: len(pair[1] & missing))
        chosen.append(best)
        missing -= covered
    return chosen
