"""Products of several weights in one call: each row has the bits of its weight's own product."""

from __future__ import annotations

import pytest
import torch
from toolkit_lm.model import NO_EPILOGUE, Epilogue, LinearMethod, LinearSpec, Shard
from toolkit_lm_cpu import library
from toolkit_lm_cpu.grouped import GroupedPanels
from toolkit_lm_cpu.layers import CpuKernels
from torch import Tensor, nn
from weight_kinds import KINDS, make_spec, random_weight

pytestmark = pytest.mark.skipif(library.refusal() is not None, reason=str(library.refusal()))
INPUTS = 128
ENDS = [3, 3, 20, 21, 98, 98, 300]
"""Of weights with no rows, few, and more than an item has."""


def plain_method(kernels: CpuKernels, outputs: int, dtype: torch.dtype) -> LinearMethod:
    spec = LinearSpec(
        kind="experts",
        prefix="layer",
        inputs=Shard.whole(INPUTS),
        outputs=(Shard.whole(outputs),),
        dtype=dtype,
    )
    layer = nn.Module()
    method = kernels.linear_method(spec)
    method.create(layer, spec)
    nn.init.normal_(layer.weight, std=INPUTS**-0.5)
    layer.requires_grad_(False)
    method.process(layer)
    return method


def make_methods(kind: str, outputs: int, dtype: torch.dtype) -> list[LinearMethod]:
    torch.manual_seed(0)
    kernels = CpuKernels()
    if kind == "plain":
        return [plain_method(kernels, outputs, dtype) for _ in ENDS]
    if kind == "float8":
        weights = [random_weight(outputs, INPUTS, groups=1) for _ in ENDS]
        weights = [
            type(weight)(
                codes=torch.randn(outputs, INPUTS).to(torch.float8_e4m3fn),
                bits=8,
                scales=weight.scales,
            )
            for weight in weights
        ]
    else:
        weights = [random_weight(outputs, INPUTS, **KINDS[kind]) for _ in ENDS]
    return [kernels.quantized_method(make_spec(weight, dtype), weight) for weight in weights]


def one_by_one(
    methods: list[LinearMethod], x: Tensor, biases: Tensor | None, epilogue: Epilogue
) -> Tensor:
    pieces = []
    begin = 0
    for number, end in enumerate(ENDS):
        bias = None if biases is None else biases[number]
        pieces.append(methods[number].apply(x[begin:end], bias, epilogue))
        begin = end
    return torch.cat(pieces)


@pytest.mark.parametrize("kind", ["plain", "float8", *KINDS])
def test_rows_have_the_bits_of_their_own_product(kind, dtype):
    """With biases and without, with activations that the kernels know and one that they do not,
    gated where a panel holds outputs of one half and where it holds some of both."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    library.use_threads()
    try:
        for outputs in (64, 40):
            methods = make_methods(kind, outputs, dtype)
            product = GroupedPanels.of(methods)
            assert product is not None
            x = torch.randn(ENDS[-1] + 5, INPUTS).to(dtype)
            biases = torch.randn(len(ENDS), outputs).to(dtype)
            ends = torch.tensor(ENDS, dtype=torch.int32)
            for added in (None, biases):
                for epilogue in (
                    NO_EPILOGUE,
                    Epilogue("silu", gated=True),
                    Epilogue("gelu"),
                    Epilogue("tanh", gated=True),
                ):
                    found = product(x, ends, added, epilogue)
                    expected = one_by_one(methods, x, added, epilogue)
                    assert torch.equal(found[: ENDS[-1]], expected), (outputs, epilogue)
    finally:
        torch.set_num_threads(threads)
        library.use_threads()


def test_rows_may_be_columns_of_a_wider_tensor_and_few_or_none():
    methods = make_methods("plain", 64, torch.float32)
    product = GroupedPanels.of(methods)
    wide = torch.randn(ENDS[-1], 2 * INPUTS + 1)
    x = wide[:, 1 : INPUTS + 1]
    ends = torch.tensor(ENDS, dtype=torch.int32)
    assert torch.equal(product(x, ends, None), one_by_one(methods, x, None, NO_EPILOGUE))
    assert product(x[:0], ends * 0, None).shape == (0, 64)


def test_weights_that_differ_are_not_grouped():
    float32 = torch.float32
    same = make_methods("plain", 64, float32)
    kernels = CpuKernels()
    assert kernels.group(same) is not None
    assert kernels.group([]) is None
    assert kernels.group([*same, *make_methods("plain", 48, float32)]) is None
    assert kernels.group([*same, *make_methods("4 bits", 64, float32)]) is None
    weight = random_weight(40, INPUTS)
    halved = kernels.quantized_method(make_spec(weight, float32, 20, 20), weight)
    assert kernels.group([halved]) is None


TOKENS = 37
TOP = 3
FIRST = 2
"""Experts of number FIRST and on are held; FIRST of others stand before and after them."""


def of_experts(
    products: tuple[GroupedPanels, GroupedPanels],
    biases: tuple[Tensor | None, Tensor | None],
    epilogue: Epilogue,
    routed: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """Operation by operation."""
    x, experts, weights = routed
    count = len(ENDS)
    held = experts - FIRST
    held = torch.where((held >= 0) & (held < count), held, count)
    chosen, order = held.flatten().sort(stable=True)
    ends = torch.searchsorted(chosen, torch.arange(count), right=True, out_int32=True)
    between = products[0](x[order // TOP], ends, biases[0], epilogue)
    rows = products[1](between, ends, biases[1])
    rows.masked_fill_((chosen >= count).unsqueeze(1), 0)
    out = torch.empty_like(rows)
    out[order] = rows
    return (out.view(len(x), TOP, INPUTS) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


@pytest.mark.parametrize("kind", ["plain", "float8", "8 bits", "4 bits"])
def test_experts_in_one_call_have_the_bits_of_its_operations(kind, dtype):
    """With experts that are held elsewhere, with some that no token goes to, and x in a wider
    tensor."""
    gate_up = make_methods(kind, 2 * INPUTS, dtype)
    down = make_methods(kind, INPUTS, dtype)
    biases = (
        torch.randn(len(ENDS), 2 * INPUTS).to(dtype),
        torch.randn(len(ENDS), INPUTS).to(dtype),
    )
    wide = torch.randn(TOKENS, 2 * INPUTS).to(dtype)
    numbers = torch.arange(len(ENDS) + 2 * FIRST)
    numbers = numbers[numbers != FIRST + 1]
    for tokens in (TOKENS, 1, 0):
        x = wide[:tokens, INPUTS:]
        drawn = torch.rand(tokens, len(numbers)).topk(TOP).indices
        routed = x, numbers[drawn], torch.rand(tokens, TOP)
        for added in ((None, None), biases):
            for activation in ("silu", "clamped_swiglu"):
                epilogue = Epilogue(activation, gated=True)
                made = CpuKernels().experts(gate_up, down, added, epilogue, FIRST)
                assert made is not None
                products = GroupedPanels.of(gate_up), GroupedPanels.of(down)
                assert torch.equal(made(*routed), of_experts(products, added, epilogue, routed))


def test_the_clamped_swiglu_is_its_formula(dtype):
    """With gates and ups beyond the limits, and NaN."""
    method = make_methods("plain", 2 * INPUTS, dtype)[0]
    x = 10 * torch.randn(50, INPUTS).to(dtype)
    x[3, 4] = torch.nan
    exact = method.multiply(x, None).double()
    gate, up = exact.chunk(2, dim=1)
    assert gate.nan_to_num().max() > 8 and up.nan_to_num().min() < -8
    gate = gate.clamp(max=7)
    expected = (up.clamp(-7, 7) + 1) * gate * torch.sigmoid(1.702 * gate)
    found = method.apply(x, None, Epilogue("clamped_swiglu", gated=True)).double()
    rounding = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, atol=rounding, rtol=rounding, equal_nan=True)


def test_experts_that_are_not_computed_in_one_call():
    dtype = torch.float32
    gate_up = make_methods("plain", 2 * INPUTS, dtype)
    down = make_methods("plain", INPUTS, dtype)
    kernels = CpuKernels()
    biases = (None, None)
    assert kernels.experts(gate_up, down, biases, Epilogue("silu", gated=True), 0) is not None
    assert kernels.experts(gate_up, down, biases, Epilogue("tanh", gated=True), 0) is None
    narrow = make_methods("plain", 40, dtype)
    assert kernels.experts(narrow, down, biases, Epilogue("silu", gated=True), 0) is None
    assert kernels.experts(gate_up, narrow, biases, Epilogue("silu", gated=True), 0) is None
