"""Products of quantized weights against the record's own weight: on a GPU, or by Triton's
interpreter, with which `test_interpreter.py` runs them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toolkit_lm.model import (
    DequantizingMethod,
    Epilogue,
    Kernels,
    LinearSpec,
    QuantizedWeight,
    Shard,
)
from toolkit_lm_triton import device as device_module, grouped as grouped_module, quantized
from toolkit_lm_triton.device import interprets, refusal
from toolkit_lm_triton.layers import TritonKernels
from toolkit_lm_triton.quantized import QuantizedProduct, ScaledProduct
from torch import Tensor

DEVICE = "cpu" if interprets() else "cuda"
runs = pytest.mark.skipif(
    refusal(DEVICE, "float32") is not None, reason=str(refusal(DEVICE, "float32"))
)
STEP = {torch.float32: 2**-23, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Most relative error of rounding a number."""
MXFP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
NF4 = torch.linspace(-1, 1, 16).sin().tolist()
KINDS: dict[str, dict[str, Any]] = {
    "1 bit": {"bits": 1, "groups": 2},
    "3 bits, mins": {"bits": 3, "groups": 6, "mins": True},
    "4 bits of an output": {"bits": 4, "groups": 1},
    "4 bits": {"bits": 4, "groups": 6},
    "4 bits, zeros": {"bits": 4, "groups": 3, "zeros": True},
    "4 bits in any order": {"bits": 4, "groups": 6, "order": True},
    "4 bits of unequal groups, zeros, mins": {
        "bits": 4,
        "groups": 5,
        "order": True,
        "zeros": True,
        "mins": True,
    },
    "MXFP4": {"bits": 4, "groups": 6, "values": MXFP4},
    "NF4": {"bits": 4, "groups": 3, "values": NF4},
    "small groups": {"bits": 4, "groups": 24},
    "5 bits, zeros, mins": {"bits": 5, "groups": 2, "zeros": True, "mins": True},
    "8 bits of an output": {"bits": 8, "groups": 1},
    "8 bits of an output, zeros": {"bits": 8, "groups": 1, "zeros": True},
    "8 bits": {"bits": 8, "groups": 6},
    "float8": {"dtype": torch.float8_e4m3fn, "groups": 1},
    "float8 of 5 exponents, groups": {"dtype": torch.float8_e5m2, "groups": 3},
}
INPUTS = 192


def random_weight(
    outputs: int,
    inputs: int = INPUTS,
    *,
    bits: int = 8,
    groups: int = 1,
    zeros: bool = False,
    mins: bool = False,
    order: bool = False,
    values: list[float] | None = None,
    dtype: torch.dtype | None = None,
    device: str = DEVICE,
) -> QuantizedWeight:
    seeded = torch.Generator().manual_seed(bits + groups)
    number = 2**bits
    codes = torch.randint(0, number, (outputs, inputs), dtype=torch.uint8, generator=seeded)
    if dtype is not None:
        codes = torch.randn(outputs, inputs, generator=seeded).to(dtype)
    scales = torch.rand(outputs, groups, generator=seeded).add_(0.1).mul_(inputs**-0.5 / number)
    least = torch.randn(outputs, groups, generator=seeded).mul_(inputs**-0.5)
    found = torch.randint(0, number, (outputs, groups), generator=seeded).float()
    shuffled = torch.arange(inputs)[torch.randperm(inputs, generator=seeded)] % groups
    return QuantizedWeight(
        codes=codes.to(device),
        bits=bits,
        scales=scales.to(device),
        zeros=found.to(device) if zeros else None,
        mins=least.to(device) if mins else None,
        groups=shuffled.to(device) if order else None,
        values=None if values is None else torch.tensor(values, device=device),
    )


def make_spec(weight: QuantizedWeight, dtype: torch.dtype, **fields: Any) -> LinearSpec:
    outputs, inputs = weight.codes.shape
    usual: dict[str, Any] = {
        "kind": "linear",
        "prefix": "layer",
        "inputs": Shard.whole(inputs),
        "outputs": (Shard.whole(outputs),),
        "dtype": dtype,
    }
    return LinearSpec(**usual | fields)


def make(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> QuantizedProduct:
    method = TritonKernels().quantized_method(make_spec(weight, dtype), weight)
    assert type(method) is QuantizedProduct
    return method


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    seeded = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=seeded).to(DEVICE, dtype)


def bound(x: Tensor, weight: QuantizedWeight, exact: Tensor) -> Tensor:
    """Most error of each result, in float64.

    Numbers are rounded to the dtype of x, and sums in float32. Where x is rounded to 8 bits, half
    a step of 128 inputs' scale comes on top, which is the greatest |x| among them / 127.
    """
    dense = weight.dequantized().double().abs()
    size = x.abs().double()
    error = (1e-5 + STEP[x.dtype]) * (size @ dense.T) + STEP[x.dtype] * exact.abs()
    if quantized.is_coded(weight):
        half_steps = torch.cat(
            [
                part.amax(1, keepdim=True).expand_as(part) / 254
                for part in size.split(quantized._CODED_TILE, dim=1)
            ],
            dim=1,
        )
        error += 1.001 * half_steps @ dense.T
    return error


@runs
@pytest.mark.parametrize("kind", KINDS)
def test_products(kind) -> None:
    """Few rows and many, with and without a bias, in a number of outputs that fills no tile."""
    weight = random_weight(37, **KINDS[kind])
    dense = weight.dequantized()
    for dtype in (torch.float32, torch.float16):
        method = make(weight, dtype)
        assert torch.equal(method.dequantized(), dense.to(dtype))
        ids = torch.tensor([3, 0, 36, 3], device=DEVICE)
        assert torch.equal(method.embed(ids), method.dequantized()[ids])
        bias = random(37, dtype=dtype)
        x = random(19, INPUTS, dtype=dtype) * 3
        for given, added in ((x, None), (x[:2], bias)):
            exact = given.double() @ dense.double().T
            exact = exact if added is None else exact + added.double()
            found = method.multiply(given, added)
            assert (found.shape, found.dtype) == (exact.shape, dtype)
            assert ((found.double() - exact).abs() <= bound(given, weight, exact)).all()


@runs
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_many_rows(kind, monkeypatch) -> None:
    """A weight is dequantized, some outputs at a time, and only as integers it is not."""
    monkeypatch.setattr(quantized, "_MANY_ROWS", 4)
    monkeypatch.setattr(quantized, "_DEQUANTIZED", 16 * INPUTS)
    weight = random_weight(37, **KINDS[kind])
    method = make(weight)
    x = random(5, INPUTS + 1)[:, 1:]
    bias = random(37)
    exact = x.double() @ weight.dequantized().double().T + bias.double()
    assert ((method.multiply(x, bias).double() - exact).abs() <= bound(x, weight, exact)).all()


@runs
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("inputs", [1, 37, 130])
def test_any_number_of_inputs(bits, inputs) -> None:
    weight = random_weight(5, inputs, bits=bits)
    x = random(3, inputs + 2)[:, 1:-1]
    exact = x.double() @ weight.dequantized().double().T
    method = make(weight)
    assert ((method.multiply(x, None).double() - exact).abs() <= bound(x, weight, exact)).all()
    assert method.multiply(x[:0], None).shape == (0, 5)
    assert torch.equal(method.multiply(x[1:2], None), method.multiply(x, None)[1:2])


@runs
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", ["4 bits", "8 bits of an output"])
def test_rows_at_the_ends_of_numbers(kind) -> None:
    """Zeros, infinity and NaN: a row is its own matter."""
    method = make(random_weight(20, **KINDS[kind]))
    x = random(5, INPUTS)
    x[1] = 0
    x[2, 5] = torch.inf
    x[3, 100] = torch.nan
    found = method.multiply(x, None)
    assert not found[1].any()
    assert not found[2:4].isfinite().any()
    assert found[[0, 4]].isfinite().all()


@runs
def test_what_follows_a_product_of_an_expert() -> None:
    """The gate's kernel follows the product, and what it lacks is computed by torch."""
    weight = random_weight(40, **KINDS["MXFP4"])
    spec = make_spec(weight, torch.float32, kind="experts", outputs=(Shard.whole(20),) * 2)
    x = random(5, INPUTS)
    bias = random(40)
    plain = Kernels().quantized_method(spec, weight)
    ours = TritonKernels().quantized_method(spec, weight)
    assert type(ours) is QuantizedProduct
    for activation, gated in (("silu", True), ("sigmoid", True), ("silu", False)):
        torch.testing.assert_close(
            ours.apply(x, bias, Epilogue(activation, gated=gated)),
            plain.apply(x, bias, Epilogue(activation, gated=gated)),
            atol=1e-4,
            rtol=1e-4,
        )
    residual = random(5, 40)
    torch.testing.assert_close(
        ours.apply(x, bias, Epilogue(residual=residual.clone())),
        plain.apply(x, bias, Epilogue(residual=residual.clone())),
        atol=1e-4,
        rtol=1e-4,
    )


GROUPED = (
    "4 bits",
    "4 bits, zeros",
    "3 bits, mins",
    "MXFP4",
    "NF4",
    "8 bits of an output",
    "float8 of 5 exponents, groups",
)


def different_weights(kind: str, count: int) -> list[QuantizedWeight]:
    """One of each expert."""
    weights = []
    for number in range(count):
        weight = random_weight(37, **KINDS[kind])
        codes = weight.codes.roll(number, 0)
        weights.append(replace(weight, codes=codes, scales=weight.scales * (1 + number)))
    return weights


@runs
@pytest.mark.parametrize("kind", GROUPED)
def test_experts_are_multiplied_by_one_kernel(kind, monkeypatch) -> None:
    """Each row by its expert's weight, in pieces: of experts with many rows, few and none, and with
    rows past the last expert's. Where rows are very many, each expert multiplies its own."""
    weights = different_weights(kind, 5)
    ends = torch.tensor([3, 3, 22, 23, 40], dtype=torch.int32, device=DEVICE)
    biases = random(5, 37)
    x = random(43, INPUTS)
    methods = [make(weight) for weight in weights]
    grouped = TritonKernels().group(methods)
    assert grouped is not None
    for added, most in ((None, 128), (biases, 128), (biases, 4)):
        monkeypatch.setattr(grouped_module, "_MANY_ROWS", most)
        found = grouped(x, ends, added)
        begin = 0
        for number, end in enumerate(ends.tolist()):
            its = x[begin:end]
            exact = its.double() @ weights[number].dequantized().double().T
            exact = exact if added is None else exact + added[number].double()
            error = (found[begin:end].double() - exact).abs()
            assert (error <= bound(its, weights[number], exact)).all()
            begin = end
    assert grouped(x[:0], ends * 0, biases).shape == (0, 37)
    # The methods have their weights still.
    for method, weight in zip(methods, weights, strict=True):
        assert torch.equal(method.dequantized(), weight.dequantized())


@runs
def test_experts_that_differ_are_not_grouped() -> None:
    same = [make(weight) for weight in different_weights("4 bits", 2)]
    kernels = TritonKernels()
    assert kernels.group([]) is None
    for kind in ("4 bits of an output", "MXFP4", "4 bits, zeros", "4 bits in any order"):
        assert kernels.group([*same, make(random_weight(37, **KINDS[kind]))]) is None
    plain = Kernels().quantized_method(
        make_spec(random_weight(37), torch.float32), random_weight(37)
    )
    assert kernels.group([*same, plain]) is None
    assert kernels.group([make(random_weight(37, **KINDS["4 bits in any order"]))] * 2) is None


def test_pieces_of_rows() -> None:
    ends = torch.tensor([3, 3, 20, 21], dtype=torch.int32)
    found = grouped_module.pieces_of(ends, 25, 8)
    assert len(found) == 25 // 8 + 4
    assert [piece for piece in found.tolist() if piece[1] < piece[2]] == [
        [0, 0, 3],
        [2, 3, 11],
        [2, 11, 19],
        [2, 19, 20],
        [3, 20, 21],
    ]
    for rows in range(1, 9):
        alone = grouped_module.pieces_of(torch.arange(1, rows + 1, dtype=torch.int32), rows, 16)
        assert alone.tolist() == [[row, row, row + 1] for row in range(rows)]


@runs
def test_a_tied_head_has_its_embeddings_method() -> None:
    weight = random_weight(20)
    embedding = make(weight)
    spec = make_spec(weight, torch.float32, kind="lm_head", tied_to=embedding)
    assert TritonKernels().quantized_method(spec, weight) is embedding


@runs
def test_a_compiler_sees_one_op() -> None:
    method = make(random_weight(20, **KINDS["4 bits in any order"]))
    x = random(3, INPUTS)
    compiled = torch.compile(
        lambda x: method.apply(x, None, Epilogue("silu")), fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(x), method.apply(x, None, Epilogue("silu")))


@runs
def test_what_no_kernel_takes_is_dequantized() -> None:
    weight = random_weight(16)
    spec = make_spec(weight, torch.float64)
    assert type(TritonKernels().quantized_method(spec, weight)) is DequantizingMethod


CHOICES: dict[str, tuple[dict[str, Any], torch.dtype, bool]] = {
    "float8": ({"dtype": torch.float8_e4m3fn}, torch.bfloat16, True),
    "with scales of groups": ({"dtype": torch.float8_e4m3fn, "groups": 2}, torch.bfloat16, False),
    "of 5 exponents": ({"dtype": torch.float8_e5m2}, torch.bfloat16, False),
    "activations in float16": ({"dtype": torch.float8_e4m3fn}, torch.float16, False),
    "inputs that do not divide": (
        {"dtype": torch.float8_e4m3fn, "inputs": 40},
        torch.bfloat16,
        False,
    ),
    "int8": ({}, torch.bfloat16, False),
}


@pytest.mark.parametrize("case", CHOICES)
def test_float8_is_multiplied_by_gpus_that_can(monkeypatch, case) -> None:
    """It is chosen by the device and the weight, when the weight is loaded."""
    fields, dtype, is_chosen = CHOICES[case]
    weight = random_weight(32, **fields, device="cpu")
    spec = make_spec(weight, dtype)
    assert not quantized.is_scaled(weight, spec), "a CPU has no such products"
    for capability, may in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        # The capability of a GPU is asked for, of whatever device the weight is on.
        monkeypatch.setattr(
            quantized,
            "multiplies_float8",
            lambda device: device_module.multiplies_float8(torch.device("cuda")),
        )
        assert quantized.is_scaled(weight, spec) is (is_chosen and may)


def scales_rows_on_a_cpu() -> bool:
    """Whether this version of PyTorch does."""
    one = torch.ones(16, 16).to(torch.float8_e4m3fn)
    scales = torch.ones(16, 1)
    try:
        torch._scaled_mm(one, one.T, scales, scales.T, out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


@pytest.mark.skipif(not scales_rows_on_a_cpu(), reason="_scaled_mm has one scale on a CPU here")
def test_products_of_float8() -> None:
    """By PyTorch's own product, which a CPU has too. Rows of x are rounded to float8: within half a
    step of 2^-4 of each number, or of the least step of the row's scale."""
    weight = random_weight(32, dtype=torch.float8_e4m3fn, device="cpu")
    method = ScaledProduct(weight, make_spec(weight, torch.bfloat16), SimpleNamespace())
    dense = weight.dequantized()
    assert torch.equal(method.dequantized(), dense.bfloat16())
    ids = torch.tensor([3, 0, 31])
    assert torch.equal(method.embed(ids), method.dequantized()[ids])
    seeded = torch.Generator().manual_seed(1)
    x = torch.randn(5, INPUTS, generator=seeded).mul_(3).bfloat16()
    x[1] = 0
    bias = torch.randn(32, generator=seeded).bfloat16()
    size = x.double().abs()
    least = size.amax(1, keepdim=True) / 448 * 2.0**-9
    error = (size * 2.0**-4).clamp(min=least) * 1.01
    for added in (None, bias):
        exact = x.double() @ dense.double().T
        exact = exact if added is None else exact + added.double()
        found = method.multiply(x, added)
        assert found.dtype is torch.bfloat16
        # The product is rounded, and so is its sum with a bias.
        most = error @ dense.double().abs().T + 2 * STEP[x.dtype] * exact.abs() + 2e-2
        assert ((found.double() - exact).abs() <= most).all()
    x[2, 3] = torch.nan
    assert method.multiply(x, None)[2].isnan().all()
