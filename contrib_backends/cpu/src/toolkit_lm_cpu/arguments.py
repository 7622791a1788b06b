"""Structs of the kernels, as named tuples: data that the kernels keep, or that several calls share.

Fields stand in the order of arguments.h, which `library` checks when the kernels are loaded. The
headers that define the structs describe the fields. Pointers are addresses, 0 for none; strides
count elements. Values that change with each call are keyword arguments, whose names and order the
kernels check themselves.
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


class Quantized(NamedTuple):
    """How the weight of a product is quantized: Quantized of product.h."""

    scales: int = 0
    offsets: int = 0
    values: int = 0
    ratios: int = 0
    levels: int = 0
    zeros: int = 0
    order: int = 0
    scaled: int = 0
    groups: int = 0
    group: int = 0
    part: int = 0
    bits: int = 0
    is_half: int = 0
    kernel: int = 0
    float8: int = 0


class LinearPart(NamedTuple):
    """A product of a layer: LinearPart of layer.h."""

    weights: int = 0
    bias: int = 0
    quantized: Quantized = Quantized()


class LowRankPart(NamedTuple):
    """B of an adapter for some outputs: LowRankPart of product.h."""

    high: int = 0
    first: int = 0
    last: int = 0
    at: int = 0
    rank: int = 0


class LowRank(NamedTuple):
    """A and B of an adapter for one product: LowRank of product.h."""

    type: int
    low: int
    inputs: int
    rank: int
    first: LowRankPart
    second: LowRankPart
    third: LowRankPart


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
    projected: int
    activation: int
    factor: float
    input: NormPart
    post: NormPart
    queries: NormPart
    keys: NormPart
    values: NormPart
    attended: NormPart
    fed: NormPart
    qkv: LinearPart
    out: LinearPart
    gate_up: LinearPart
    down: LinearPart
    scalar: int
    gate: LinearPart
    projection: LinearPart
    gated: NormPart
    embedding_size: int
    key_pages: int
    value_pages: int
    key_page: int
    value_page: int
    block_tiles: int
    code: int
    key_scales: int
    value_scales: int
    scale_page: int
    scale: float
    soft_cap: float
    window: int
    sinks: int


TUPLES: tuple[type[Any], ...] = (
    Rows,
    NormPart,
    Quantized,
    LinearPart,
    LowRankPart,
    LowRank,
    Layer,
)
"""All tuples of this module."""


def check_fields(theirs: Mapping[str, tuple[str, ...]]) -> None:
    """Checks that the compiled kernels expect the fields of these tuples. Raises ImportError if
    they differ."""
    ours = {tuple_.__name__: tuple_._fields for tuple_ in TUPLES}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise ImportError(
                f"they were compiled from other sources: {name} has the fields "
                f"{theirs.get(name)} in C, and {ours.get(name)} in arguments.py"
            )
