"""B A x of adapters inside the kernels' products."""

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
from toolkit_lm_cpu.layers import CpuKernels
from toolkit_lm_cpu.library import _kernels, refusal
from torch import nn

pytestmark = pytest.mark.skipif(refusal() is not None, reason=str(refusal()))
DTYPES = {
    "float32": 1e-5,
    "bfloat16": 2e-2,
    "float16": 4e-3,
}
INPUTS = 96
OUTPUTS = (64, 32, 48)
"""Parts of the layer's outputs."""
KINDS = [0, 1, 2, 1, 0, 2, 2, 3, 3, 3, *[1] * 40, 2, 0, 3]
"""The adapter of each row; 0: none. Adapter 1 has a run, and 3 rows that are far apart."""


def made(dtype: torch.dtype, kernels: CpuKernels, *, quantized: bool = False) -> Any:
    """A linear method with random weights, and these."""
    torch.manual_seed(0)
    weight = torch.randn(sum(OUTPUTS), INPUTS).to(dtype)
    spec = LinearSpec(
        kind="linear",
        prefix="qkv",
        inputs=Shard.whole(INPUTS),
        outputs=tuple(Shard.whole(size) for size in OUTPUTS),
        dtype=dtype,
    )
    if quantized:
        codes = torch.randint(-7, 8, weight.shape, dtype=torch.int8)
        scales = torch.rand(len(weight), 1) * 0.1 + 0.05
        given = QuantizedWeight(codes=(codes + 128).to(torch.uint8), scales=scales, bits=8)
        return kernels.quantized_method(spec, given), codes * scales
    return filled(kernels, spec, weight), weight


def filled(kernels: CpuKernels, spec: LinearSpec, weight: Any) -> Any:
    layer = nn.Module()
    method = kernels.linear_method(spec)
    method.create(layer, spec)
    layer.weight.data.copy_(weight)
    method.process(layer)
    return method


def plain_method(kernels: CpuKernels, dtype: torch.dtype, outputs: int, inputs: int) -> Any:
    spec = LinearSpec(
        kind="linear",
        prefix="plain",
        inputs=Shard.whole(inputs),
        outputs=(Shard.whole(outputs),),
        dtype=dtype,
    )
    return filled(kernels, spec, torch.randn(outputs, inputs) * 0.1)


def pair_of(rank: int, seed: int, *, whole: bool = True) -> list[tuple[int, Any, Any]]:
    torch.manual_seed(seed)
    firsts = np.cumsum([0, *OUTPUTS[:-1]])
    parts = [
        (int(first), torch.randn(rank, INPUTS) * 0.1, torch.randn(size, rank) * 0.3)
        for first, size in zip(firsts, OUTPUTS, strict=True)
    ]
    return parts if whole else parts[::2]


PAIRS = {1: pair_of(16, 1), 2: pair_of(5, 2, whole=False), 3: pair_of(40, 3)}
SCALES = {1: 1.0, 2: 0.5, 3: 2.0}


def delta(x: Any, number: int) -> Any:
    """B A x in float64."""
    out = torch.zeros(len(x), sum(OUTPUTS), dtype=torch.float64)
    for first, low, high in PAIRS.get(number, ()):
        part = x.double() @ low.double().T @ high.double().T
        out[:, first : first + len(high)] += SCALES[number] * part
    return out


def begin(low_rank: Any, method: Any, packed: dict[int, Any], kinds: list[int]) -> None:
    of = np.array(kinds)
    groups = [
        AdaptedRows({method: packed[number]}, SCALES[number], np.flatnonzero(of == number))
        for number in sorted(set(kinds) - {0})
    ]
    low_rank.set(groups, len(kinds))


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_get_their_own_adapters_whatever_others_have(dtype, quantized) -> None:
    kernels = CpuKernels()
    type_ = getattr(torch, dtype)
    if type_ not in kernels._types:
        pytest.skip("this processor lacks it")
    method, weight = made(type_, kernels, quantized=quantized)
    low_rank = kernels.low_rank()
    assert low_rank is not None and low_rank.takes(method)
    packed = {number: low_rank.pack(method, parts) for number, parts in PAIRS.items()}
    x = torch.randn(len(KINDS), INPUTS).to(type_)
    plain = method.apply(x, None)
    begin(low_rank, method, packed, KINDS)
    found = method.apply(x, None)
    for row, number in enumerate(KINDS):
        one = x[row : row + 1]
        if number == 0:
            assert torch.equal(found[row], plain[row])
            continue
        base = plain[row].double() if quantized else one.double() @ weight.double().T
        expected = base + delta(one, number)
        error = (found[row].double() - expected).abs().max()
        assert error <= 2 * DTYPES[dtype] * expected.abs().max(), (row, number)
        begin(low_rank, method, packed, [number])
        assert torch.equal(method.apply(one, None)[0], found[row]), (row, number)
        alone = low_rank.product(packed[number], one)[0].double() * SCALES[number]
        error = (alone - delta(one, number)[0]).abs().max()
        assert error <= 2 * DTYPES[dtype] * delta(one, number).abs().max()
    low_rank.set([], len(KINDS))
    assert torch.equal(method.apply(x, None), plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 33, 150])
def test_many_adapters_of_products_one_after_the_other(isa, dtype, rows) -> None:
    """Sums of quarters, A that is fetched for the next product, several blocks of rows."""
    kernels = CpuKernels()
    type_ = getattr(torch, dtype)
    if type_ not in kernels._types:
        pytest.skip("this processor lacks it")
    inputs = 512
    torch.manual_seed(0)
    methods = [plain_method(kernels, type_, size, inputs) for size in (inputs, 200)]
    low_rank = kernels.low_rank()
    assert low_rank is not None
    parts = [
        [
            (torch.randn(16, inputs) * 0.1, torch.randn(method.outputs, 16) * 0.3)
            for method in methods
        ]
        for _ in range(16)
    ]
    packed = [
        {
            method: low_rank.pack(method, [(0, low, high)])
            for method, (low, high) in zip(methods, pairs, strict=True)
        }
        for pairs in parts
    ]
    x = torch.randn(rows, inputs).to(type_)
    kinds = np.arange(rows) % 17

    def results(some: Any, kinds: Any) -> list[Any]:
        groups = [
            AdaptedRows(packed[kind], 0.5, np.flatnonzero(kinds == kind))
            for kind in sorted({*kinds} - {16})
        ]
        low_rank.set(groups, len(kinds))
        return [method.apply(some, None) for method in methods]

    found = results(x, kinds)
    for row in {0, 1, rows // 2, rows - 1}:
        alone = results(x[row : row + 1], kinds[row : row + 1])
        for mine, of_all in zip(alone, found, strict=True):
            assert torch.equal(mine[0], of_all[row])
    low_rank.set([], rows)
    for number, method in enumerate(methods):
        plain = method.apply(x, None).double()
        for row, kind in enumerate(kinds):
            if kind < 16:
                low, high = parts[kind][number]
                plain[row] += 0.5 * high.double() @ (low.double() @ x[row].double())
        error = (found[number].double() - plain).abs().max()
        assert error <= 2 * DTYPES[dtype] * plain.abs().max()


def test_adapters_of_the_next_product_have_the_same_groups() -> None:
    following = _kernels.low_ranks((None, None), None)
    assert _kernels.low_ranks((None, None), following) is not None
    with pytest.raises(ValueError, match="adapters of 1 groups of rows, and 2 follow"):
        _kernels.low_ranks((None,), following)
    with pytest.raises(ValueError, match="incorrect name"):
        _kernels.low_ranks((None,), _kernels.row_groups((), 16))


@pytest.mark.parametrize("epilogue", [NO_EPILOGUE, Epilogue("silu"), Epilogue("relu2")], ids=str)
def test_adapters_come_before_the_activation(epilogue) -> None:
    """Also one that the kernels do not fuse."""
    kernels = CpuKernels()
    method, weight = made(torch.float32, kernels)
    low_rank = kernels.low_rank()
    assert low_rank is not None
    begin(low_rank, method, {1: low_rank.pack(method, PAIRS[1])}, [1, 1])
    x = torch.randn(2, INPUTS)
    bias = torch.randn(sum(OUTPUTS))
    expected = epilogue.finish((x.double() @ weight.double().T + delta(x, 1) + bias).float())
    error = (method.apply(x, bias, epilogue) - expected).abs().max()
    assert error <= 1e-5 * expected.abs().max()


def test_other_rows_than_the_steps_have_none() -> None:
    kernels = CpuKernels()
    method, _ = made(torch.float32, kernels)
    low_rank = kernels.low_rank()
    assert low_rank is not None
    x = torch.randn(3, INPUTS)
    plain = method.apply(x, None)
    begin(low_rank, method, {1: low_rank.pack(method, PAIRS[1])}, [1, 1, 0])
    assert torch.equal(method.apply(x, None, rows=Rows.SAMPLED), plain)
    assert torch.equal(method.apply(x[:2], None), plain[:2])
    assert torch.equal(method.multiply(x, None), plain)
    assert not torch.equal(method.apply(x, None), plain)


def test_parts_that_share_a_panel_are_joined() -> None:
    kernels = CpuKernels()
    method, weight = made(torch.float32, kernels)
    low_rank = kernels.low_rank()
    assert low_rank is not None
    parts = [(3, torch.randn(4, INPUTS), torch.randn(20, 4))]
    begin(low_rank, method, {1: low_rank.pack(method, parts)}, [1])
    x = torch.randn(1, INPUTS)
    expected = x @ weight.T
    expected[:, 3:23] += x @ parts[0][1].T @ parts[0][2].T
    assert (method.apply(x, None) - expected).abs().max() < 1e-3


def test_rows_past_the_last_are_an_error() -> None:
    kernels = CpuKernels()
    method, _ = made(torch.float32, kernels)
    low_rank = kernels.low_rank()
    assert low_rank is not None
    pairs = {method: low_rank.pack(method, PAIRS[1])}
    low_rank.set([AdaptedRows(pairs, 1.0, np.array([1, 2]))], 2)
    with pytest.raises(ValueError, match="there are 2 rows, and an adapter of row 2"):
        method.apply(torch.randn(2, INPUTS), None)


def test_pairs_lie_side_by_side_in_one_chunk() -> None:
    """Huge pages: A and B of small ones would miss the TLB at every few panels."""
    kernels = CpuKernels()
    method, _ = made(torch.float32, kernels)
    low_rank = kernels.low_rank()
    assert low_rank is not None
    pairs = [low_rank.pack(method, parts) for parts in PAIRS.values()]
    tensors = [tensor for pair in pairs for tensor in pair.tensors]
    firsts = [tensor.data_ptr() for tensor in tensors]
    ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors]
    assert max(ends) - min(firsts) < sum(pair.nbytes for pair in pairs) + 64 * len(tensors)
