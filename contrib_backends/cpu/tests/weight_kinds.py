"""Quantized weights of all kinds, with random codes."""

from __future__ import annotations

from typing import Any

import torch
from toolkit_lm.model import LinearSpec, QuantizedWeight, Shard

MXFP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
KINDS: dict[str, dict[str, Any]] = {
    "1 bit": {"bits": 1, "groups": 2},
    "2 bits": {"bits": 2, "groups": 4},
    "3 bits, mins": {"bits": 3, "groups": 4, "mins": True},
    "4 bits of a channel": {"bits": 4, "groups": 1},
    "4 bits": {"bits": 4, "groups": 4},
    "4 bits, zeros": {"bits": 4, "groups": 4, "zeros": True},
    "4 bits in any order": {"bits": 4, "groups": 4, "order": True},
    "2 bits of a table": {"bits": 2, "groups": 4, "values": [-3.0, -0.5, 0.5, 2.0]},
    "4 bits of a table": {"bits": 4, "groups": 4, "values": MXFP4},
    "4 bits of a table, zeros and mins": {
        "bits": 4,
        "groups": 2,
        "values": list(range(-127, 113, 15)),
        "zeros": True,
        "mins": True,
    },
    "5 bits, zeros and mins": {"bits": 5, "groups": 2, "zeros": True, "mins": True},
    "8 bits of a channel": {"bits": 8, "groups": 1},
    "8 bits of a channel, zeros": {"bits": 8, "groups": 1, "zeros": True},
    "8 bits": {"bits": 8, "groups": 4},
    "8 bits in any order, zeros": {"bits": 8, "groups": 2, "order": True, "zeros": True},
}


def random_weight(
    outputs: int,
    inputs: int,
    *,
    bits: int = 8,
    groups: int = 1,
    zeros: bool = False,
    mins: bool = False,
    order: bool = False,
    values: list[float] | None = None,
) -> QuantizedWeight:
    number = 2**bits
    return QuantizedWeight(
        codes=torch.randint(0, number, (outputs, inputs), dtype=torch.uint8),
        bits=bits,
        scales=torch.rand(outputs, groups).add_(0.1).mul_(inputs**-0.5 / number),
        zeros=torch.randint(0, number, (outputs, groups)).float() if zeros else None,
        mins=torch.randn(outputs, groups).mul_(inputs**-0.5) if mins else None,
        groups=torch.arange(inputs)[torch.randperm(inputs)] % groups if order else None,
        values=None if values is None else torch.tensor(values, dtype=torch.float32),
    )


def make_spec(weight: QuantizedWeight, dtype: torch.dtype, *parts: int) -> LinearSpec:
    outputs, inputs = weight.codes.shape
    return LinearSpec(
        kind="linear",
        prefix="layer",
        inputs=Shard.whole(inputs),
        outputs=tuple(map(Shard.whole, parts or (outputs,))),
        dtype=dtype,
    )
