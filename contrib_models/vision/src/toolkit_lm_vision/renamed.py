"""Renamed: weights by other names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor


class Renamed:
    """Weights by the names of the model in transformers 5, however often they are read."""

    def __init__(
        self, weights: Iterable[tuple[str, Tensor]], patterns: Sequence[tuple[re.Pattern[str], str]]
    ) -> None:
        """`patterns`: each is replaced, one after the other."""
        self.weights = list(weights) if iter(weights) is weights else weights
        self.patterns = patterns

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights:
            for pattern, replacement in self.patterns:
                name = pattern.sub(replacement, name)
            yield name, tensor
