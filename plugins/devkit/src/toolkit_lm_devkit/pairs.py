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

    def draw(values: Sequence[Any], plain: float) -> int:
        return 0 if rng.random() < plain else int(rng.integers(len(values)))

    drawn = dict.fromkeys(
        tuple(draw(values, plain) for values in factors.values())
        for plain in [0.0, 0.0, 0.6] * 1000
    )
    pool = [
        (indices, case)
        for indices in drawn
        if allowed(
            case := {name: factors[name][i] for name, i in zip(factors, indices, strict=True)}
        )
    ]
    if not pool:
        return []
    indices = np.array([indices for indices, _ in pool])
    first, second = np.triu_indices(len(factors), 1)
    # [cases, pairs of factors]: a number for each pair of values.
    most = max(len(values) for values in factors.values())
    covered = (np.arange(len(first)) * most + indices[:, first]) * most + indices[:, second]
    missing = np.zeros(len(first) * most * most, bool)
    missing[covered] = True
    chosen = []
    while missing.any():
        best = int(missing[covered].sum(axis=1).argmax())
        chosen.append(pool[best][1])
        missing[covered[best]] = False
    return chosen
