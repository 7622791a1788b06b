"""Products of quantized weights: within half a step of x's codes of the exact result, and the same
bits by all instructions, whatever else is in the batch."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toolkit_lm.model import (
    DequantizingMethod,
    Epilogue,
    LinearSpec,
    QuantizedWeight,
    gate,
    get_activation,
)
from toolkit_lm_cpu import float8, library, quantized
from toolkit_lm_cpu.float8 import Float8Panels
from toolkit_lm_cpu.layers import CpuKernels
from toolkit_lm_cpu.library import _kernels
from toolkit_lm_cpu.panels import ACTIVATIONS
from toolkit_lm_cpu.quantized import QuantizedPanels, explain, refusal
from torch import Tensor
from torch.nn import functional as F
from weight_kinds import KINDS, make_spec, random_weight

pytestmark = pytest.mark.skipif(library.refusal() is not None, reason=str(library.refusal()))
STEP = {torch.float32: 2**-23, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Most relative error of rounding a result."""
CODE_KERNELS = tuple(getattr(_kernels, "CODE_KERNELS", ()))


@pytest.fixture
def threads() -> Iterator[None]:
    yield
    library.use_threads()


@pytest.fixture(params=CODE_KERNELS)
def kernel(request, monkeypatch) -> str:
    use_kernel(monkeypatch, request.param)
    return request.param


def use_kernel(monkeypatch, isa: str, *, able: bool = False) -> None:
    if not able and not _kernels.supports(isa):
        pytest.skip(f"the processor lacks {isa}")
    monkeypatch.setattr(quantized, "code_kernel", lambda: CODE_KERNELS.index(isa))


def pack(
    weight: QuantizedWeight, dtype: torch.dtype = torch.float32, *parts: int
) -> QuantizedPanels:
    method = CpuKernels().quantized_method(make_spec(weight, dtype, *parts), weight)
    assert isinstance(method, QuantizedPanels)
    return method


def bound(x: Tensor, method: QuantizedPanels, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Most error of each result [rows, outputs], of what the held weights would give.

    Codes are off by half a step of their group's scale at most, which is its greatest |x| / 127.
    Half a step of each input times |W| is therefore the bound, and rounding of sums and of the
    result comes on top.
    """
    group_of = groups_of_inputs(method)
    groups = int(group_of.max()) + 1
    steps = torch.stack(
        [x.abs().double()[:, group_of == g].amax(1) / 127 for g in range(groups)], dim=1
    )
    dense = held(method).double().abs()
    rounding = 1e-5 * (x.abs().double() @ dense.T + steps[:, group_of] @ dense.T)
    return 0.5 * steps[:, group_of] @ dense.T + rounding + STEP[dtype] * exact.abs()


def held(method: QuantizedPanels) -> Tensor:
    """The weights that the kernels multiply by: float32."""
    dtype, method.dtype = method.dtype, torch.float32
    dense = method.dequantized()
    method.dtype = dtype
    return dense


def groups_of_inputs(method: QuantizedPanels) -> Tensor:
    """Those that share a scale of x."""
    runs = torch.arange(method.inputs) // method.group
    return (
        runs
        if method.order is None
        else torch.empty_like(runs).index_copy_(0, method.order.long(), runs)
    )


def assert_holds(method: QuantizedPanels, weight: QuantizedWeight) -> None:
    """It holds a weight as it is; by levels within a step of 8 bits: half of it for their
    rounding, and as much for the rounding of ratios."""
    dense = weight.dequantized()
    if method.ratios is None:
        torch.testing.assert_close(
            method.dequantized(), dense.to(method.dtype), rtol=2 * STEP[method.dtype], atol=1e-6
        )
    else:
        places = torch.arange(len(dense))
        if method.is_halved:
            half = len(dense) // 2
            places[half:] += -half % 16
        step = method.scales.view(-1, 1)[places]
        error = (held(method) - dense).abs()
        assert (error <= 1.01 * step).all()
        assert error.norm() < 0.02 * dense.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(48, 64), (33, 128), (100, 320)], ids=str)
def test_products(kernel, kind, shape) -> None:
    weight = random_weight(*shape, **KINDS[kind])
    bias = torch.randn(shape[0])
    for dtype in STEP:
        method = pack(weight, dtype)
        dense = held(method)
        assert_holds(method, weight)
        ids = torch.tensor([3, 0, shape[0] - 1, 3])
        assert torch.equal(method.embed(ids), method.dequantized()[ids])
        x = torch.randn(70, shape[1]).mul_(3).to(dtype)
        exact = x.double() @ dense.double().T
        whole = method.multiply(x, None)
        assert (whole.shape, whole.dtype) == ((70, shape[0]), dtype)
        assert ((whole.double() - exact).abs() <= bound(x, method, exact, dtype)).all()
        shifted = method.multiply(x, bias.to(dtype))
        exact = exact + bias.to(dtype).double()
        assert ((shifted.double() - exact).abs() <= bound(x, method, exact, dtype)).all()


@pytest.mark.parametrize("inputs", [1, 5, 37, 63, 65, 1000])
@pytest.mark.parametrize("bits", [4, 8])
def test_any_number_of_inputs_and_outputs(kernel, bits, inputs) -> None:
    weight = random_weight(7, inputs, bits=bits)
    method = pack(weight)
    x = torch.randn(5, inputs)
    exact = x.double() @ weight.dequantized().double().T
    found = method.multiply(x, None)
    assert ((found.double() - exact).abs() <= bound(x, method, exact, torch.float32)).all()
    assert method.multiply(x[:0], None).shape == (0, 7)


def levels_in_plain_torch(weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """Codes of 8 bits [N, K] and scales [N, 1] of groups of codes of 4 bits."""
    zeros = weight.scales.new_zeros(()) if weight.zeros is None else weight.zeros - 8
    most = 8.0 if weight.zeros is None else max(8.0, zeros.max().item() + 8, 7 - zeros.min().item())
    greatest = weight.scales.amax(1, keepdim=True)
    ratios = (weight.scales * (127 / greatest)).round().long().unsqueeze(2)
    codes = weight.codes.view(len(weight.codes), weight.scales.shape[1], -1).float() - 8
    unit = 32767 / most
    levels = (codes * unit).round().clamp(min=-32768) - (zeros * unit).round().unsqueeze(-1)
    return (levels.long() * ratios + 2**14 >> 15).flatten(1), greatest * most / 127


def in_plain_torch(x: Tensor, weight: QuantizedWeight, group: int) -> Tensor:
    """The kernels' arithmetic: exact sums of a group, and then fused multiplications, which float64
    has room for."""
    groups = x.shape[1] // group
    parts = x.view(len(x), groups, -1)
    most = parts.abs().amax(2)
    codes = (parts * (127 / most).unsqueeze(2)).round()
    scales = most / 127
    values = weight.codes.long() - 2 ** (weight.bits - 1)
    of_weight = weight.scales
    if weight.bits == 4 and of_weight.shape[1] in range(2, x.shape[1] // 32 + 1):
        values, of_weight = levels_in_plain_torch(weight)
    values = values.view(len(values), groups, -1).double()
    is_one = of_weight.shape[1] == 1
    total = torch.zeros(len(x), len(weight.codes))
    for g in range(groups):
        sums = (codes[:, g].double() @ values[:, g].T).float()
        both = scales[:, g, None] * (1 if is_one else of_weight[:, g])
        total = (sums.double() * both.double() + total.double()).float()
    return total * of_weight[:, 0] if is_one else total


@pytest.mark.parametrize(
    ("bits", "groups", "zeros", "inputs"),
    [
        (4, 4, False, 256),
        (4, 8, True, 256),
        (4, 16, False, 256),
        (8, 1, False, 256),
        (8, 1, False, 1536),
        (8, 8, False, 256),
    ],
)
def test_the_arithmetic_is_that_of_plain_torch(kernel, bits, groups, zeros, inputs) -> None:
    weight = random_weight(48, inputs, bits=bits, groups=groups, zeros=zeros)
    method = pack(weight)
    x = torch.randn(9, inputs)
    assert torch.equal(method.multiply(x, None), in_plain_torch(x, weight, method.group))
    assert (method.ratios is None) == (bits == 8 or groups == 16)


@pytest.mark.parametrize(
    ("inputs", "group"),
    [(96, 32), (256, 128), (384, 128), (768, 256), (1024, 512), (1536, 512), (2816, 256)],
)
def test_wide_rows_have_a_scale_for_more_inputs(inputs, group) -> None:
    """Scaling sums of 128 inputs takes the tiles of AMX as long as multiplying them."""
    assert pack(random_weight(16, inputs, bits=8)).group == group


def test_scales_that_differ_much_stay_as_they_are() -> None:
    """Codes of 8 bits of the greatest one would be coarser than those of 4 bits."""
    weight = random_weight(48, 2048, bits=4, groups=64)
    assert pack(weight).ratios is not None
    weight.scales[:, 0] *= 16
    method = pack(weight)
    assert method.ratios is None
    torch.testing.assert_close(method.dequantized(), weight.dequantized())


def test_scales_below_0(kernel) -> None:
    """As those of Q4_0 of GGUF."""
    weight = random_weight(48, 256, bits=4, groups=8)
    weight.scales[:, ::2] *= -1
    method = pack(weight)
    assert method.ratios is not None
    assert_holds(method, weight)
    x = torch.randn(17, 256)
    exact = x.double() @ held(method).double().T
    error = (method.multiply(x, None).double() - exact).abs()
    assert (error <= bound(x, method, exact, torch.float32)).all()


@pytest.mark.parametrize(("rows", "inputs"), [(77, 320), (35, 2560)])
@pytest.mark.parametrize("kind", KINDS)
def test_all_instructions_give_the_same_bits(monkeypatch, kind, rows, inputs) -> None:
    weight = random_weight(100, inputs, **KINDS[kind])
    x = torch.randn(rows, inputs)
    found = []
    for isa in CODE_KERNELS:
        if _kernels.supports(isa):
            use_kernel(monkeypatch, isa)
            found.append(pack(weight).multiply(x, None))
    assert len(found) >= 1 and all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_others(kernel, kind) -> None:
    """Neither on their number, nor on its place, nor on the number of threads."""
    weight = random_weight(210, 512, **KINDS[kind])
    method = pack(weight, torch.bfloat16)
    x = torch.randn(96, 512).bfloat16()
    whole = method.multiply(x, None)
    for number in (1, 3):
        _kernels.set_threads(number)
        for rows in range(1, 97):
            assert torch.equal(method.multiply(x[-rows:], None), whole[-rows:])


@pytest.mark.parametrize("name", sorted(name for name in ACTIVATIONS if name))
@pytest.mark.parametrize("half", [48, 20, 171])
def test_what_follows_a_product(kernel, half, name) -> None:
    """Activations, gates and residuals, as of the product alone."""
    weight = random_weight(2 * half, 64, bits=4, groups=2, zeros=True)
    method = pack(weight, torch.float32, half, half)
    bias = torch.randn(2 * half)
    residual = torch.randn(21, 2 * half)
    x = torch.randn(21, 64).mul_(3)
    product = method.multiply(x, bias)
    exact = F.linear(x, weight.dequantized(), bias)
    assert (product - exact).norm() < 0.02 * exact.norm()
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(
        method.apply(x, bias, Epilogue(name)), get_activation(name)(product.clone()), **close
    )
    torch.testing.assert_close(
        method.apply(x, bias, Epilogue(name, gated=True)), gate(product.clone(), name), **close
    )
    torch.testing.assert_close(
        method.apply(x, bias, Epilogue(residual=residual)), product + residual
    )
    assert torch.equal(method.embed(torch.arange(2 * half)), method.dequantized())
    assert_holds(method, weight)


def test_an_activation_that_the_kernels_lack() -> None:
    weight = random_weight(32, 64)
    method = pack(weight)
    x = torch.randn(3, 64)
    found = method.apply(x, None, Epilogue("sigmoid"))
    torch.testing.assert_close(found, method.multiply(x, None).sigmoid())


def test_rows_at_the_ends_of_numbers(kernel) -> None:
    """Nothing, too small, infinite, and NaN: a row is its own matter."""
    weight = random_weight(20, 128, bits=4, groups=2, zeros=True)
    method = pack(weight)
    x = torch.randn(6, 128)
    x[1] = 0
    x[2] *= 1e-38
    x[3, 5] = torch.inf
    x[4, 100] = torch.nan
    x[5] *= 1e30
    found = method.multiply(x, None)
    assert not found[1].any()
    torch.testing.assert_close(found[2], torch.zeros(20), atol=1e-35, rtol=0)
    assert found[3:5].isnan().all()
    assert found[[0, 5]].isfinite().all()
    assert torch.equal(found[0], method.multiply(x[:1], None)[0])


@pytest.mark.parametrize(
    "fields",
    [{"bits": 8}, {"bits": 4}, {"bits": 4, "zeros": True}, {"bits": 4, "values": [*range(16)]}],
    ids=str,
)
def test_scales_in_16_bits_give_the_same_bits(kernel, fields) -> None:
    """They are held so where that is exact. Panels are taken by three and, the last, alone."""
    weight = random_weight(100, 128, groups=8, **fields)
    assert pack(weight).scales.dtype is torch.float32
    method = pack(replace(weight, scales=weight.scales.half().float()))
    assert method.scales.dtype is torch.float16
    x = torch.randn(70, 128)
    found = [method.multiply(x[:rows], None) for rows in (1, 5, 70)]
    rows = method.dequantized()
    method.scales = method.scales.float()
    for out in found:
        assert torch.equal(out, method.multiply(x[: len(out)], None))
    assert torch.equal(rows, method.dequantized())


def test_strided_rows(kernel) -> None:
    method = pack(random_weight(32, 64, bits=4, groups=2), torch.bfloat16)
    wide = torch.randn(9, 131).bfloat16()
    for x in (wide[:, :64], wide[:, 3:67], wide[:, :128:2]):
        assert torch.equal(method.multiply(x, None), method.multiply(x.contiguous(), None))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("outputs", [1, 100, 1003])
def test_the_likeliest_output_is_that_of_the_product(kernel, outputs) -> None:
    method = pack(random_weight(outputs, 64, bits=8), torch.bfloat16)
    bias = torch.randn(outputs).bfloat16()
    x = torch.randint(-2, 3, (130, 64)).bfloat16()
    x[1] = torch.nan
    x[2] = 0
    for number in (1, 2):
        _kernels.set_threads(number)
        for rows in (0, 1, 33, 130):
            for added in (None, bias):
                best, found = method.likeliest(x[:rows], added)
                expected = CpuKernels().likeliest(method.multiply(x[:rows], added))
                assert torch.equal(best.nan_to_num(7), expected[0].nan_to_num(7))
                assert found.tolist() == expected[1].tolist()


def test_a_compiler_sees_one_op(kernel) -> None:
    method = pack(random_weight(48, 64, bits=4, groups=2, zeros=True))
    x = torch.randn(5, 64)
    bias = torch.randn(48)
    compiled = torch.compile(
        lambda x: method.apply(x, bias, Epilogue("silu")), fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(x), method.apply(x, bias, Epilogue("silu")))


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOAT8_SCALES = {"tensor": 1, "channel": 1, "blocks of 128": 128, "groups of 32": 32}
"""Inputs of a scale, or 1 for all of them."""


def float8_weight(outputs: int, inputs: int, dtype: torch.dtype, scales: str) -> QuantizedWeight:
    """All finite numbers of float8, the smallest too."""
    bits = torch.arange(256, dtype=torch.uint8)
    finite = bits[bits.view(dtype).float().isfinite()]
    codes = finite[torch.randint(0, len(finite), (outputs, inputs))]
    size = FLOAT8_SCALES[scales]
    rows = {"tensor": 1, "blocks of 128": -(-outputs // 128)}.get(scales, outputs)
    stored = torch.rand(rows, 1 if size == 1 else inputs // size).add_(0.1)
    of_rows = torch.arange(outputs) // (-(-outputs // rows))
    return QuantizedWeight(codes=codes.view(dtype), bits=8, scales=stored[of_rows].contiguous())


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("scales", FLOAT8_SCALES)
@pytest.mark.parametrize("kind", FLOAT8, ids=str)
def test_products_of_float8_are_those_of_its_numbers(monkeypatch, kind, scales) -> None:
    """By all instructions. Neither weights nor inputs are rounded; a row does not depend on others,
    and there may be more than an item takes."""
    for best in library.KERNELS.values():
        for dtype, number in best.items():
            isa = next(isa for isa in library.KERNELS if library.KERNELS[isa] is best)
            if not _kernels.supports(isa):
                continue
            monkeypatch.setattr(float8, "product_type", lambda *_, number=number: number)
            weight = float8_weight(100, 640, kind, scales)
            method = pack(weight, dtype)
            assert type(method) is Float8Panels
            dense = weight.dequantized()
            assert torch.equal(method.dequantized(), dense.to(dtype))
            x = torch.randn(260, 640).div_(64).to(dtype)
            bias = torch.randn(100).to(dtype)
            exact = x.double() @ dense.double().T + bias.double()
            whole = method.multiply(x, bias)
            rounding = 1e-5 * (x.abs().double() @ dense.abs().double().T)
            error = (whole.double() - exact).abs()
            assert (error <= STEP[dtype] * exact.abs() + rounding).all()
            for rows in (1, 7, 17, 33, 257):
                _kernels.set_threads(1 + rows % 2)
                assert torch.equal(method.multiply(x[-rows:], bias), whole[-rows:])


def test_each_number_of_float8_is_exact() -> None:
    """Each number of both kinds, by a product with the unit matrix."""
    for kind in FLOAT8:
        weight = float8_weight(48, 128, kind, "tensor")
        weight = replace(weight, scales=torch.ones(48, 1))
        for dtype in STEP:
            found = pack(weight, dtype).multiply(torch.eye(128, dtype=dtype), None)
            assert torch.equal(found.float(), weight.codes.float().T)


@pytest.mark.parametrize("half", [48, 20])
def test_what_follows_a_product_of_float8(half) -> None:
    weight = float8_weight(2 * half, 256, torch.float8_e4m3fn, "channel")
    method = pack(replace(weight, scales=weight.scales / 2**12), torch.float32, half, half)
    x = torch.randn(21, 256)
    bias = torch.randn(2 * half)
    product = method.multiply(x, bias)
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(product, F.linear(x, method.dequantized(), bias), **close)
    torch.testing.assert_close(
        method.apply(x, bias, Epilogue("silu", gated=True)), gate(product.clone(), "silu"), **close
    )
    best, found = method.likeliest(x, bias) or (None, None)
    assert (best is None) == (half % 16 != 0)
    if best is not None and found is not None:
        assert torch.equal(best, product.amax(1)) and torch.equal(found, product.argmax(1))
    compiled = torch.compile(
        lambda x: method.apply(x, bias, Epilogue("silu")), fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(x), method.apply(x, bias, Epilogue("silu")))


def test_float8_is_explained_as_it_is_stored() -> None:
    weight = float8_weight(24, 64, torch.float8_e5m2, "channel")
    found = CpuKernels().explain_quantized(make_spec(weight, torch.float32), weight)
    assert found.startswith("float8_e5m2 as stored")
    assert "rounded" not in found


ROUNDED: dict[str, tuple[dict[str, Any], str]] = {
    "another float8": (
        {"codes": torch.randn(24, 64).to(torch.float8_e4m3fnuz)},
        "codes in torch.float8_e4m3fnuz",
    ),
    "a small group of float8": (
        {"codes": torch.randn(24, 64).to(torch.float8_e4m3fn), "scales": torch.ones(24, 8)},
        "a group of 8 inputs is not a multiple of 16",
    ),
    "groups of float8 in any order": (
        {
            "codes": torch.randn(24, 64).to(torch.float8_e4m3fn),
            "scales": torch.ones(24, 2),
            "groups": torch.arange(64) % 2,
        },
        "are not runs of equal length",
    ),
    "a large table": ({"values": torch.linspace(-1, 1, 256)}, "of 4 bits, and no more"),
    "a small group": ({"scales": torch.ones(24, 8)}, "a group of 8 inputs is not a multiple of 16"),
    "a group without inputs": (
        {"scales": torch.ones(24, 4), "groups": torch.arange(64) // 32},
        "unequal size",
    ),
    "unequal groups": (
        {"scales": torch.ones(24, 2), "groups": torch.arange(64) // 48},
        "unequal size",
    ),
}


@pytest.mark.parametrize("case", ROUNDED)
def test_other_weights_are_rounded_to_8_bits(kernel, case) -> None:
    """A weight is off by half a step at most, which is its group's greatest / 127."""
    fields, reason = ROUNDED[case]
    stated: dict[str, Any] = {
        "codes": torch.randint(0, 256, (24, 64), dtype=torch.uint8),
        "bits": 8,
        "scales": torch.ones(24, 1),
    }
    weight = QuantizedWeight(**stated | fields)
    method = pack(weight)
    assert method.rounded is not None and reason in method.rounded
    dense = weight.dequantized()
    step = dense.view(24, 2, 32).abs().amax(2).repeat_interleave(32, dim=1) / 127
    assert ((method.dequantized() - dense).abs() <= 0.5001 * step).all()
    x = torch.randn(9, 64)
    exact = x @ dense.T
    assert (method.multiply(x, None) - exact).norm() < 0.02 * exact.norm()
    assert pack(random_weight(24, 64)).rounded is None


EXPLAINED: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"{bits} bits": ({"bits": bits, "groups": 2}, "" if bits in (4, 8) else f"those of {bits}")
        for bits in range(1, 9)
    },
    "one scale": ({"bits": 4}, ""),
    "an odd number of inputs": ({"inputs": 63}, ""),
    "zeros": ({"bits": 4, "zeros": True}, "an offset"),
    "mins": ({"bits": 4, "mins": True}, "an offset"),
    "an order": ({"bits": 4, "groups": 4, "order": True}, "into the order"),
    "a table": ({"bits": 4, "values": [*range(16)]}, "a table"),
    "groups of 16": ({"bits": 4, "groups": 4}, "for 16 inputs"),
    "groups of 32": ({"bits": 4, "groups": 2}, "codes of 8 bits with one scale per output"),
    "groups of 8": ({"bits": 4, "groups": 8}, "a group of 8 inputs"),
}


@pytest.mark.parametrize("case", [*EXPLAINED, *ROUNDED])
@pytest.mark.parametrize("isa", CODE_KERNELS)
def test_what_multiplies_by_a_weight_is_explained_as_it_is(monkeypatch, isa, case) -> None:
    """By each kernel, with a reason for each faster one; and the same of a weight that is not
    read."""
    number = CODE_KERNELS.index(isa)
    monkeypatch.setattr(_kernels, "supports", lambda name: CODE_KERNELS.index(name) <= number)
    use_kernel(monkeypatch, isa)
    if case in EXPLAINED:
        fields, words = EXPLAINED[case]
        weight = random_weight(24, **({"inputs": 64} | fields))
    else:
        fields, words = ROUNDED[case]
        weight = replace(random_weight(24, 64), **fields)
    found = CpuKernels().explain_quantized(make_spec(weight, torch.float32), weight)
    method = pack(weight)
    assert found.startswith(f"codes of {method.bits} bits by {isa}")
    assert words in found
    assert (method.rounded or "") in found
    assert ("rounded" in found) == (method.rounded is not None)
    faster = CODE_KERNELS[number + 1 :]
    assert [name for name in faster if f"{name}: this processor lacks it" not in found] == []
    if weight.groups is None:
        names = ("codes", "scales", "zeros", "mins", "values")
        stored = {name: getattr(weight, name) for name in names}
        unread = {name: one.to("meta") for name, one in stored.items() if one is not None}
        assert explain(replace(weight, **unread)) == found


def test_a_limit_of_the_environment_is_a_reason(monkeypatch) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, "avx2")
    use_kernel(monkeypatch, "avx2")
    assert "avx512_vnni: TOOLKIT_LM_CPU_ISA is avx2" in explain(random_weight(24, 64))


def test_values_that_are_no_whole_numbers() -> None:
    """Those of nf4 are off by half a 127th of the greatest."""
    values = torch.linspace(-1, 1, 16).sin()
    weight = random_weight(24, 64, bits=4, groups=4, values=values.tolist())
    method = pack(weight)
    assert method.rounded is None
    most = 0.5 / 127 * values.abs().max() * weight.scales.repeat_interleave(16, dim=1)
    assert ((method.dequantized() - weight.dequantized()).abs() <= 1.001 * most).all()


def test_kernels_refuse_a_dtype_and_more_inputs_than_sums_have_room_for() -> None:
    weight = random_weight(2, 2**16 + 64)
    spec = make_spec(weight, torch.float32)
    assert "more than 65536 inputs" in str(refusal(weight, spec))
    method = CpuKernels().quantized_method(spec, weight)
    assert type(method) is DequantizingMethod
    small = random_weight(2, 64)
    assert "torch.float64" in str(refusal(small, make_spec(small, torch.float64)))


def test_a_tied_head_shares_its_embeddings_panels() -> None:
    weight = random_weight(100, 64)
    embedding = pack(weight)
    spec = make_spec(weight, torch.float32)
    head = CpuKernels().quantized_method(
        LinearSpec(
            kind="lm_head",
            prefix="head",
            inputs=spec.inputs,
            outputs=spec.outputs,
            dtype=spec.dtype,
            tied_to=embedding,
        ),
        weight,
    )
    assert head is embedding


@pytest.mark.parametrize(
    ("limit", "best"),
    [
        ("avx2", ["avx2"] * 4),
        ("avx512", ["avx2", "avx_vnni", "avx512_vnni", "avx512_vnni"]),
        ("amx", CODE_KERNELS),
        ("", CODE_KERNELS),
    ],
)
def test_the_best_instructions_within_the_limit(monkeypatch, limit, best) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, limit)
    for number, expected in enumerate(best, start=1):
        able = SimpleNamespace(
            supports=CODE_KERNELS[:number].__contains__, CODE_KERNELS=CODE_KERNELS
        )
        monkeypatch.setattr(library, "_kernels", able)
        assert CODE_KERNELS[library.code_kernel.__wrapped__()] == expected


@pytest.fixture(scope="module")
def emulated(tmp_path_factory) -> Any:
    """The kernels with the tiles of AMX in plain C."""
    if not _kernels.supports("avx512_vnni"):
        pytest.skip("the processor lacks avx512_vnni")
    library_path = tmp_path_factory.mktemp("emulated") / "_kernels.abi3.so"
    command = [
        *os.environ.get("CC", "cc").split(),
        *["-std=gnu11", "-O1", "-D_GNU_SOURCE", "-shared", "-fPIC", "-pthread", "-include"],
        str(Path(__file__).with_name("emulated_tiles.h")),
        f"-I{sysconfig.get_path('include')}",
        str(Path(library.__file__).parent / "kernels" / "module.c"),
        "-lm",
        "-o",
        str(library_path),
    ]
    subprocess.run(command, check=True)
    spec = importlib.util.spec_from_file_location("emulated._kernels", library_path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_of_amx_give_the_same_bits(monkeypatch, emulated, kind) -> None:
    cases = [
        (pack(weight), torch.randn(70, inputs))
        for inputs in (320, 1024)
        for weight in [random_weight(100, inputs, **KINDS[kind])]
    ]
    expected = [method.multiply(x, None) for method, x in cases]
    monkeypatch.setattr(quantized, "_kernels", emulated)
    use_kernel(monkeypatch, "amx_int8", able=True)
    for (method, x), whole in zip(cases, expected, strict=True):
        for rows in (1, 8, 9, 16, 17, 33, 70):
            assert torch.equal(method.multiply(x[:rows], None), whole[:rows])
