"""Weights that a checkpoint may lack."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor


def with_substitutes(
    weights: Iterable[tuple[str, Tensor]], substitutes: Mapping[str, str | Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """`weights`, and for each name of `substitutes` that is not among them: the tensor, or that of
    the weight of the other name."""
    named = {name for name in substitutes.values() if isinstance(name, str)}
    seen: set[str] = set()
    kept: dict[str, Tensor] = {}
    for name, tensor in weights:
        seen.add(name)
        if name in named:
            kept[name] = tensor
        yield name, tensor
    for name, substitute in substitutes.items():
        if name in seen:
            continue
        if not isinstance(substitute, str):
            yield name, substitute
        elif substitute in kept:
            yield name, kept[substitute]
