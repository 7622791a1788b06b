"""B A x of adapters in products of the kernels: on a GPU, or by Triton's interpreter, with which
`test_interpreter.py` runs these tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from toolkit_lm.model import (
    NO_EPILOGUE,
    AdaptedRows,
    Epilogue,
    LinearSpec,
    QuantizedWeight,
    Rows,
    Shard,
)
from toolkit_lm_triton.device import interprets, refusal
from toolkit_lm_triton.layers import TritonKernels
from toolkit_lm_triton.low_rank import _rounds
from torch import nn

DEVICE = "cpu" if interprets() else "cuda"
pytestmark = pytest.mark.skipif(
    refusal(DEVICE, "float32") is not None, reason=str(refusal(DEVICE, "float32"))
)
INPUTS = 1100
"""More than a program adds up."""
OUTPUTS = (72, 40)
KINDS = [0, 1, 2, 1, 0, 2, 3, 3, *[1] * 18, 2, 0]
"""The adapter of each row; 0: none."""
RANKS = {1: 16, 2: 5, 3: 40}
SCALES = {1: 1.0, 2: 0.5, 3: 2.0}


def method_of(dtype: torch.dtype, *, quantized: bool = False) -> tuple[Any, Any]:
    """A linear method with random weights, and these."""
    torch.manual_seed(0)
    kernels = TritonKernels()
    spec = LinearSpec(
        kind="linear",
        prefix="gate_up",
        inputs=Shard.whole(INPUTS),
        outputs=tuple(Shard.whole(size) for size in OUTPUTS),
        dtype=dtype,
    )
    weight = torch.randn(sum(OUTPUTS), INPUTS).to(DEVICE, dtype)
    if quantized:
        codes = torch.randint(-7, 8, weight.shape, dtype=torch.int8, device=DEVICE)
        scales = torch.rand(len(weight), 1, device=DEVICE) * 0.1 + 0.05
        given = QuantizedWeight(codes=(codes + 128).to(torch.uint8), scales=scales, bits=8)
        return kernels.quantized_method(spec, given), codes * scales
    layer = nn.Module()
    method = kernels.linear_method(spec)
    with torch.device(DEVICE):
        method.create(layer, spec)
    layer.weight.data.copy_(weight)
    method.process(layer)
    return method, weight


def parts_of(number: int) -> list[tuple[int, Any, Any]]:
    """Adapter 2 changes the second half alone."""
    torch.manual_seed(number)
    rank = RANKS[number]
    made = [
        (first, torch.randn(rank, INPUTS) * 0.1, torch.randn(size, rank) * 0.3)
        for first, size in ((0, OUTPUTS[0]), (OUTPUTS[0], OUTPUTS[1]))
    ]
    return made[1:] if number == 2 else made


def delta(x: Any, number: int) -> Any:
    """B A x in float64."""
    out = torch.zeros(len(x), sum(OUTPUTS), dtype=torch.float64, device=x.device)
    for first, low, high in parts_of(number) if number else ():
        part = x.double() @ low.double().T.to(x.device) @ high.double().T.to(x.device)
        out[:, first : first + len(high)] += SCALES[number] * part
    return out


def begin(low_rank: Any, method: Any, packed: dict[int, Any], kinds: list[int]) -> None:
    of = np.array(kinds)
    groups = [
        AdaptedRows({method: packed[number]}, SCALES[number], np.flatnonzero(of == number))
        for number in sorted(set(kinds) - {0})
    ]
    low_rank.set(groups, len(kinds))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_adapters_of_rows_whatever_others_have(dtype) -> None:
    method, weight = method_of(dtype)
    low_rank = TritonKernels().low_rank()
    assert low_rank.takes(method)
    packed = {number: low_rank.pack(method, parts_of(number)) for number in RANKS}
    x = torch.randn(len(KINDS), INPUTS).to(DEVICE, dtype)
    plain = method.apply(x, None)
    begin(low_rank, method, packed, KINDS)
    found = method.apply(x, None)
    close = 1e-5 if dtype is torch.float32 else 4e-3
    for number in range(4):
        mine = [row for row, kind in enumerate(KINDS) if kind == number]
        if number == 0:
            assert torch.equal(found[mine], plain[mine])
            continue
        expected = x[mine].double() @ weight.double().T + delta(x[mine], number)
        assert (found[mine] - expected).abs().max() <= close * expected.abs().max()
        # The sums with zeros have the same bits alone.
        own = x[mine[:1]]
        begin(low_rank, method, packed, KINDS)
        among = method.added.to(x, torch.zeros_like(plain))[mine[0]]
        begin(low_rank, method, packed, [number])
        assert torch.equal(method.added.to(own, torch.zeros_like(plain[:1]))[0], among)
        alone = low_rank.product(packed[number], own) * SCALES[number]
        assert (alone - delta(own, number)).abs().max() <= close * expected.abs().max()
    low_rank.set([], len(KINDS))
    assert torch.equal(method.apply(x, None), plain)


@pytest.mark.parametrize("epilogue", [Epilogue("silu", gated=True), Epilogue("relu")], ids=str)
def test_adapters_of_rows_come_before_the_activation(epilogue) -> None:
    torch.manual_seed(0)
    method, weight = method_of(torch.float32)
    low_rank = TritonKernels().low_rank()
    x = torch.randn(2, INPUTS).to(DEVICE)
    if epilogue.gated:
        method.stored.data[OUTPUTS[0] :] *= 0.1
        weight = method.stored
    begin(low_rank, method, {1: low_rank.pack(method, parts_of(1))}, [1, 1])
    expected = epilogue.finish((x.double() @ weight.double().T + delta(x, 1)).float())
    assert (method.apply(x, None, epilogue) - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_adapters_of_rows_of_quantized_weights() -> None:
    method, _ = method_of(torch.float32, quantized=True)
    low_rank = TritonKernels().low_rank()
    x = torch.randn(len(KINDS), INPUTS).to(DEVICE)
    plain = method.apply(x, None)
    begin(low_rank, method, {n: low_rank.pack(method, parts_of(n)) for n in RANKS}, KINDS)
    found = method.apply(x, None)
    for row, number in enumerate(KINDS):
        expected = plain[row].double() + delta(x[row : row + 1], number)[0]
        assert (found[row] - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_adapters_of_rows_that_have_several() -> None:
    """One is added after the other; other rows than the step's have none."""
    method, _ = method_of(torch.float32)
    low_rank = TritonKernels().low_rank()
    packed = {number: low_rank.pack(method, parts_of(number)) for number in RANKS}
    rows = {1: [0, 1], 2: [1, 2], 3: [3]}
    groups = [
        AdaptedRows({method: packed[number]}, SCALES[number], np.array(some))
        for number, some in rows.items()
    ]
    assert _rounds([group.rows for group in groups]) == [0, 1, 0]
    x = torch.randn(5, INPUTS).to(DEVICE)
    plain = method.apply(x, None)
    fewer = method.apply(x[:3], None)
    low_rank.set(groups, 5)
    found = method.apply(x, None)
    for row in range(5):
        expected = plain[row].double()
        for number, some in rows.items():
            if row in some:
                expected = expected + delta(x[row : row + 1], number)[0]
        assert (found[row] - expected).abs().max() <= 1e-5 * plain.abs().max()
    assert torch.equal(method.apply(x, None, NO_EPILOGUE, rows=Rows.SAMPLED), plain)
    assert torch.equal(method.apply(x[:3], None), fewer)
    assert torch.equal(method.multiply(x, None), plain)
