"""What the kernels keep, or are given for more than one call: named tuples, each of which fills a
struct of C.

Field by field they are as arguments.h lists them, which `library` checks when the kernels are
loaded. The headers that define the structs say what a field is. Pointers are addresses, and 0 where
there is nothing; strides count elements. What changes with each call are keyword arguments, whose
names and order the kernels check themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Rows(NamedTuple):
    """The rows of a step: Step of step.h."""

    starts: int
    seen: int
    first: int
    origins: int
    rows: int
    table: int
    table_stride: int


class NormPart(NamedTuple):
    """A norm of a layer: NormPart of layer.h."""

    weight: int = 0
    size: int = 0
    eps: float = 0.0
    is_wide: bool = False


class LinearPart(NamedTuple):
    """A product of a layer: LinearPart of layer.h."""

    weights: int = 0
    bias: int = 0


class Layer(NamedTuple):
    """A decoder layer, and its cache: Layer of layer.h."""

    type: int
    attention_type: int
    element: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    activation: int
    factor: float
    input: NormPart
    post: NormPart
    queries: NormPart
    keys: NormPart
    attended: NormPart
    fed: NormPart
    qkv: LinearPart
    out: LinearPart
    gate_up: LinearPart
    down: LinearPart
    key_pages: int
    value_pages: int
    key_page: int
    value_page: int
    block_tiles: int
    scale: float
    soft_cap: float
    window: int


TUPLES: tuple[type[Any], ...] = (Rows, NormPart, LinearPart, Layer)
"""All of this module."""


def check_fields(theirs: Mapping[str, tuple[str, ...]]) -> None:
    """Raises ImportError where compiled kernels expect other tuples than there are here."""
    ours = {tuple_.__name__: tuple_._fields for tuple_ in TUPLES}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise ImportError(
                f"they were compiled from other sources: {name} has the fields "
                f"{theirs.get(name)} in C, and {ours.get(name)} in arguments.py"
            )
