"""Layers' kernels against the exact result, and bit for bit whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import (
    Epilogue,
    GatedColumnParallelLinear,
    Kernels,
    LinearSpec,
    ParallelLMHead,
    ReplicatedLinear,
    RMSNorm,
    Shard,
    VocabParallelEmbedding,
    construction,
    gate,
    get_activation,
)
from toolkit_lm_cpu import library, panels
from toolkit_lm_cpu.arena import Arena
from toolkit_lm_cpu.layers import CpuKernels, OneDnnLinear
from toolkit_lm_cpu.library import _kernels, refusal
from toolkit_lm_cpu.panels import ACTIVATIONS, PanelLinear
from toolkit_lm_devkit import assert_bf16_error
from torch import Tensor
from torch.nn import functional as F

pytestmark = pytest.mark.skipif(refusal() is not None, reason=str(refusal()))
ERROR = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Most difference to the exact result, by the greatest element of it. A sum of 4,112 floats in
order may be off by so much."""


@pytest.fixture
def threads() -> Iterator[None]:
    yield
    library.use_threads()


def make_linear(
    outputs: int, inputs: int, dtype: torch.dtype, *, bias: bool = True
) -> tuple[ReplicatedLinear, Tensor]:
    """A layer with random weights, and its weight."""
    config = VllmConfig.default(dtype=str(dtype).removeprefix("torch."))
    with construction(kernels=CpuKernels()):
        layer = ReplicatedLinear(inputs, outputs, bias=bias, vllm_config=config, prefix="layer")
    weight = torch.randn(outputs, inputs).mul_(inputs**-0.5).to(dtype)
    layer.weight.data.copy_(weight)
    if bias:
        layer.bias.data.normal_()
    layer.requires_grad_(False)
    layer.method.process(layer)
    assert isinstance(layer.method, PanelLinear) and not hasattr(layer, "weight")
    return layer, weight


def error(ours: Tensor, exact: Tensor) -> float:
    return ((ours.double() - exact).abs().max() / exact.abs().max()).item()


@pytest.mark.parametrize("shape", [(48, 64), (100, 2080), (768, 768), (33, 16), (7, 4112)], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 8, 9, 17, 64, 65, 130])
def test_products(dtype, shape, rows) -> None:
    layer, weight = make_linear(*shape, dtype)
    x = torch.randn(rows, shape[1]).to(dtype)
    residual = torch.randn(rows, shape[0]).to(dtype)
    exact = F.linear(x.double(), weight.double(), layer.bias.double())
    plain = layer(x)
    assert (plain.shape, plain.dtype) == ((rows, shape[0]), dtype)
    if rows:
        assert error(plain, exact) < ERROR[dtype]
        assert (
            error(
                layer.method.apply(x, layer.bias, Epilogue(residual=residual)),
                exact + residual.double(),
            )
            < ERROR[dtype]
        )
        assert error(layer.method.apply(x, None), exact - layer.bias.double()) < ERROR[dtype]


@pytest.mark.parametrize("name", sorted(name for name in ACTIVATIONS if name))
def test_activations(dtype, name) -> None:
    layer, weight = make_linear(96, 64, dtype)
    x = torch.randn(21, 64).mul_(3).to(dtype)
    exact = F.linear(x.double(), weight.double(), layer.bias.double())
    assert (
        error(layer.method.apply(x, layer.bias, Epilogue(name)), get_activation(name)(exact))
        < 2 * ERROR[dtype]
    )
    assert (
        error(layer.method.apply(x, layer.bias, Epilogue(name, gated=True)), gate(exact, name))
        < 2 * ERROR[dtype]
    )


def test_halves_that_are_no_whole_panels(dtype) -> None:
    layer, weight = make_linear(40, 64, dtype)
    x = torch.randn(5, 64).to(dtype)
    exact = gate(F.linear(x.double(), weight.double(), layer.bias.double()), "silu")
    assert (
        error(layer.method.apply(x, layer.bias, Epilogue("silu", gated=True)), exact)
        < 3 * ERROR[dtype]
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("half", [20, 32, 171])
def test_gates_of_any_size(dtype, half, bias) -> None:
    """A row by itself gives the same; and so does the layer in parts, as for an activation that the
    kernels lack."""
    config = VllmConfig.default(dtype=str(dtype).removeprefix("torch."))
    with construction(kernels=CpuKernels()):
        layer = GatedColumnParallelLinear(
            64, half, activation="silu", bias=bias, vllm_config=config, prefix="layer"
        )
    weight = layer.weight.data.normal_(std=0.1).clone()
    if bias:
        layer.bias.data.normal_()
    layer.requires_grad_(False)
    layer.method.process(layer)
    assert layer.method.is_halved == (half != 32)
    x = torch.randn(70, 64).to(dtype)
    product = F.linear(x.double(), weight.double(), layer.bias.double() if bias else None)
    found = layer(x)
    assert error(found, gate(product, "silu")) < 3 * ERROR[dtype]
    assert torch.equal(layer(x[3:4]), found[3:4])
    assert error(layer.method.multiply(x, layer.bias), product) < ERROR[dtype]
    assert (
        error(
            layer.method.apply(x, layer.bias, Epilogue("sigmoid", gated=True)),
            gate(product, "sigmoid"),
        )
        < 3 * ERROR[dtype]
    )
    assert (
        error(layer.method.apply(x, layer.bias, Epilogue("relu")), product.relu())
        < 2 * ERROR[dtype]
    )


def test_activations_at_the_ends_of_numbers() -> None:
    layer, _ = make_linear(16, 16, torch.float32, bias=False)
    layer.method.packed.copy_(torch.eye(16).flatten())
    x = torch.tensor(
        [
            0.0,
            -0.0,
            1e-30,
            -1e-30,
            88,
            -88,
            200,
            -200,
            1e30,
            -1e30,
            1e38,
            -1e38,
            torch.inf,
            -torch.inf,
            torch.nan,
            1,
        ]
    )
    for name in ("relu", "silu", "gelu", "gelu_new", "quick_gelu"):
        ours = layer.method.apply(torch.diag(x), None, Epilogue(name)).diag()
        plain = get_activation(name)(x)
        torch.testing.assert_close(ours[:12], plain[:12], rtol=1e-5, atol=1e-6, msg=name)
        assert ours[14].isnan() and ours[15] == pytest.approx(plain[15].item(), abs=1e-6)


@pytest.mark.usefixtures("threads")
def test_a_row_does_not_depend_on_others(dtype) -> None:
    """Neither on their number, nor on its place, nor on the number of threads."""
    layer, _ = make_linear(1000, 2080, dtype)
    x = torch.randn(200, 2080).to(dtype)
    whole = layer.method.apply(x, layer.bias, Epilogue("silu"))
    for number in (1, 3):
        _kernels.set_threads(number)
        assert torch.equal(layer.method.apply(x, layer.bias, Epilogue("silu")), whole)
        for begin, end in ((0, 1), (63, 66), (100, 109), (7, 200)):
            assert torch.equal(
                layer.method.apply(x[begin:end], layer.bias, Epilogue("silu")), whole[begin:end]
            )


def test_strided_rows(dtype) -> None:
    layer, _ = make_linear(32, 64, dtype)
    wide = torch.randn(9, 131).to(dtype)
    for x in (wide[:, :64], wide[:, 3:67], wide[:, :128:2]):
        assert torch.equal(layer(x), layer(x.contiguous()))


def test_what_the_kernels_do_not_take_goes_another_way() -> None:
    spec = LinearSpec(
        kind="linear",
        prefix="x",
        inputs=Shard.whole(63),
        outputs=(Shard.whole(8),),
        dtype=torch.bfloat16,
    )
    assert not isinstance(CpuKernels().linear_method(spec), PanelLinear)
    layer, weight = make_linear(32, 64, torch.float32)
    x = torch.randn(3, 64)
    torch.testing.assert_close(
        layer.method.apply(x, layer.bias, Epilogue("sigmoid")),
        get_activation("sigmoid")(F.linear(x, weight, layer.bias)),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_onednn_where_there_is_no_avx2(monkeypatch, dtype) -> None:
    kernels = CpuKernels()
    monkeypatch.setattr(kernels, "_types", {})
    config = VllmConfig.default(dtype=dtype)
    with construction(kernels=kernels):
        layer = ReplicatedLinear(64, 48, bias=True, vllm_config=config, prefix="layer")
    assert isinstance(layer.method, OneDnnLinear)
    layer.requires_grad_(False)
    weight = layer.weight.data.normal_(std=0.1).clone()
    layer.bias.data.normal_()
    layer.method.process(layer)
    x = torch.randn(5, 64).to(weight.dtype)
    residual = torch.randn(5, 48).to(weight.dtype)
    exact = F.linear(x.double(), weight.double(), layer.bias.double())
    for activation in (None, "gelu", "relu", "silu"):
        expected = exact if activation is None else get_activation(activation)(exact)
        assert (
            error(layer.method.apply(x, layer.bias, Epilogue(activation)), expected)
            < 2 * ERROR[weight.dtype]
        )
    assert (
        error(
            layer.method.apply(x, layer.bias, Epilogue(residual=residual)),
            exact + residual.double(),
        )
        < ERROR[weight.dtype]
    )
    assert (
        error(layer.method.apply(x, layer.bias, Epilogue("silu", gated=True)), gate(exact, "silu"))
        < 3 * ERROR[weight.dtype]
    )


def test_it_is_for_the_cpu() -> None:
    assert CpuKernels.refuses(VllmConfig.default()) is None
    assert (
        CpuKernels.refuses(VllmConfig.default().replace(device="cuda:1"))
        == "it has nothing for device cuda:1"
    )


@pytest.mark.parametrize("shape", [(1, 16), (37, 768), (5, 3, 64), (0, 32)], ids=str)
def test_norms(dtype, shape) -> None:
    ours = CpuKernels()
    plain = Kernels()
    x = torch.randn(shape).mul_(3).add_(0.5).to(dtype)
    residual = torch.randn(shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    bias = torch.randn(shape[-1]).to(dtype)

    def check(given: Tensor, reference: Tensor, exact: Tensor) -> None:
        if dtype is torch.float32:
            torch.testing.assert_close(given.double(), exact, atol=1e-5, rtol=1e-5)
        elif x.numel():
            assert_bf16_error([given], [reference], [exact])

    check(
        ours.rms_norm(x, weight, 1e-5),
        plain.rms_norm(x, weight, 1e-5),
        plain.rms_norm(x.double(), weight.double(), 1e-5),
    )
    wide = weight.float() + 1e-4
    check(
        ours.rms_norm(x, wide, 1e-5),
        plain.rms_norm(x, wide, 1e-5),
        F.rms_norm(x.double(), wide.shape, wide.double(), 1e-5),
    )
    layer = x, weight, bias, weight.shape, 1e-5
    check(
        ours.layer_norm(*layer),
        plain.layer_norm(*layer),
        F.layer_norm(x.double(), weight.shape, weight.double(), bias.double(), 1e-5),
    )
    if x.dim() == 2:
        given, total = ours.add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(total, x + residual)
        check(
            given,
            plain.rms_norm(total, weight, 1e-5),
            plain.rms_norm(total.double(), weight.double(), 1e-5),
        )


def test_norms_of_strided_heads(dtype) -> None:
    kernels = CpuKernels()
    packed = torch.randn(11, 7 * 64).to(dtype)
    heads = packed[:, 64:320].view(11, 4, 64)
    weight = torch.randn(64).to(dtype)
    assert torch.equal(
        kernels.rms_norm(heads, weight, 1e-6), kernels.rms_norm(heads.contiguous(), weight, 1e-6)
    )


def test_norms_of_rows_that_no_vector_fits() -> None:
    x = torch.randn(3, 40)
    weight = torch.randn(40)
    assert torch.equal(CpuKernels().rms_norm(x, weight, 1e-5), Kernels().rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize(
    ("size", "interleaved"),
    [(64, False), (32, False), (24, False), (40, False), (2, False), (64, True)],
)
def test_rotations(dtype, size, interleaved) -> None:
    packed = torch.randn(300, 6 * 64).to(dtype)
    angles = torch.randn(300, 1, size // 2)
    cos = torch.cat((angles.cos(),) * 2, -1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    given, reference, exact = (packed.clone()[:, : 5 * 64].view(300, 5, 64) for _ in range(3))
    assert CpuKernels().rotate(given, cos, sin, interleaved) is given
    Kernels().rotate(reference, cos, sin, interleaved)
    exact = Kernels().rotate(exact.double(), cos.double(), sin.double(), interleaved)
    assert torch.equal(given[..., size:], reference[..., size:])
    if dtype is torch.float32:
        torch.testing.assert_close(given.double(), exact, atol=1e-6, rtol=1e-6)
    else:
        assert_bf16_error([given], [reference], [exact])


@pytest.mark.parametrize("size", [1, 15, 16, 33, 1000])
def test_the_likeliest(dtype, size) -> None:
    scores = torch.randn(40, size).to(dtype)
    scores[1] = -torch.inf
    scores[2] = 1
    scores[3, size // 2 :] = torch.inf
    scores[4, size - 1] = torch.nan
    scores[5] = torch.nan
    best, found = CpuKernels().likeliest(scores)
    expected, _ = scores.max(-1)
    assert best.dtype is dtype and torch.equal(best.nan_to_num(7), expected.nan_to_num(7))
    same = (scores == expected.unsqueeze(1)) | (scores.isnan() & expected.isnan().unsqueeze(1))
    assert found.tolist() == same.int().argmax(-1).tolist()


@pytest.mark.parametrize("size", [1, 15, 16, 33, 1000])
def test_soft_caps(dtype, size) -> None:
    """Rows of a wider tensor, in place; what is beside them stays. Torch rounds at the same
    places, and its tanh differs in the last bits of a float."""
    wide = 40 * torch.randn(40, size + 3).to(dtype)
    wide[3, 0] = torch.inf
    wide[4, 0] = -torch.inf
    wide[5, 0] = torch.nan
    before = wide.clone()
    found = CpuKernels().soft_cap(wide[:, :size], 30.0)
    assert found.data_ptr() == wide.data_ptr()
    assert torch.equal(wide[:, size:], before[:, size:])
    expected = 30.0 * torch.tanh(before[:, :size] / 30.0)
    rounding = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=rounding, equal_nan=True)


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("outputs", [1, 100, 1003])
def test_the_likeliest_output_is_that_of_the_product(dtype, outputs, number, threads) -> None:
    # Small numbers have exact sums, and many are equal.
    weight = torch.randint(-2, 3, (outputs, 64)).to(dtype)
    bias = torch.randn(outputs).to(dtype)
    x = torch.randint(-2, 3, (130, 64)).to(dtype)
    x[1] = torch.nan
    x[2] = 0
    x[3, 5] = torch.inf
    type = library.product_type(dtype, 64)
    packed = panels.pack(weight, type, Arena())
    _kernels.set_threads(number)
    for rows in (0, 1, 33, 130):
        for added in (None, bias):
            product = panels.linear(type, x[:rows], packed, outputs, added, 0, False, None)
            best, found = panels.likeliest(type, x[:rows], packed, outputs, added)
            expected = CpuKernels().likeliest(product)
            assert best.dtype is dtype and torch.equal(
                best.nan_to_num(7), expected[0].nan_to_num(7)
            )
            assert found.tolist() == expected[1].tolist()
            assert found.tolist() == [
                (row.isnan() if row.isnan().any() else row == row.max()).int().argmax()
                for row in product
            ]


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_finds_tokens_without_logits(dtype, tied, monkeypatch) -> None:
    config = VllmConfig.default(dtype=str(dtype).removeprefix("torch."))
    with construction(kernels=CpuKernels()):
        embedding = VocabParallelEmbedding(1000, 64, vllm_config=config, prefix="embed")
        head = ParallelLMHead(
            1000, 64, tied_to=embedding if tied else None, vllm_config=config, prefix="head"
        )
    torch.nn.init.normal_(head.method.weight)
    head.method.process(head)
    x = torch.randn(40, 64).to(dtype)
    best, found = CpuKernels().likeliest(head(x))
    monkeypatch.setattr(type(head.method), "multiply", None)
    monkeypatch.setattr(type(head.method), "apply", None)
    assert all(map(torch.equal, head.likeliest(x), (best, found)))
    for row in range(40):
        assert all(
            map(
                torch.equal,
                head.likeliest(x[row : row + 1]),
                (best[row : row + 1], found[row : row + 1]),
            )
        )


def test_norm_layers_use_the_kernels_that_they_are_made_with(monkeypatch) -> None:
    used = []
    monkeypatch.setattr(CpuKernels, "rms_norm", lambda self, x, weight, eps: used.append(eps) or x)
    with construction(kernels=CpuKernels()):
        norm = RMSNorm(8, eps=0.25, vllm_config=VllmConfig.default())
    norm(torch.zeros(1, 8))
    assert used == [0.25] and panels.LANES == 16


@pytest.mark.parametrize("shape", [(1, 192), (3, 384), (192, 192), (5, 63)], ids=str)
def test_products_of_heads(shape) -> None:
    kernels = CpuKernels()
    weight = torch.randn(shape)
    bias = torch.randn(shape[0])
    x = torch.randn(70, shape[1])
    whole = kernels.linear(x, weight, bias)
    torch.testing.assert_close(whole, F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(
        kernels.linear(x, weight, None), F.linear(x, weight), rtol=1e-5, atol=1e-4
    )
    if shape[1] % 2 == 0:
        assert all(
            torch.equal(kernels.linear(x[i : i + 1], weight, bias), whole[i : i + 1])
            for i in range(70)
        )
    other = torch.randn(shape)
    torch.testing.assert_close(
        kernels.linear(x, other, None), F.linear(x, other), rtol=1e-5, atol=1e-4
    )


def loaded_linear(
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    tensors: list[tuple[Tensor, int | None]],
    parallel: VllmConfig | None = None,
):
    """A layer of parts of these sizes, after its parameter's loader was given tensors; and what was
    written into the parameter."""
    layer = torch.nn.Module()
    method = PanelLinear(Arena())
    parts = tuple(
        Shard.even(size, parallel.parallel, "rows") if parallel else Shard.whole(size)
        for size in sizes
    )
    method.create(
        layer,
        LinearSpec(
            kind="linear", prefix="layer", inputs=Shard.whole(64), outputs=parts, dtype=dtype
        ),
    )
    weight = layer.weight.detach().zero_()
    for tensor, shard_id in tensors:
        layer.weight.weight_loader(layer.weight, tensor, shard_id)
    copied = weight.clone()
    method.process(layer)
    return method, copied


def test_weights_are_packed_as_they_are_loaded(dtype) -> None:
    weight = torch.randn(112, 64).to(dtype)
    q, k, v = weight.split([64, 16, 32])
    expected = panels.pack(weight, library.product_type(dtype, 64), Arena())
    other = torch.float64 if dtype is torch.float32 else torch.float32
    at_odd = torch.empty(16 * 64 + 1, dtype=dtype)[1:].view(16, 64).copy_(k)
    cases = {
        "one by one": ([(v, 2), (q, 0), (k, 1)], 0),
        "together": ([(weight, None)], 0),
        "the second is of another dtype": ([(q, 0), (k.to(other), 1), (v, 2)], 16),
        "all are of another dtype": ([(weight.to(other), None)], 112),
        "the second lies column by column": ([(q, 0), (k.t().contiguous().t(), 1), (v, 2)], 16),
        "the second is at an odd address": (
            [(q, 0), (at_odd, 1), (v, 2)],
            0 if dtype is torch.float32 else 16,
        ),
        "the second comes twice": ([(q, 0), (k * 2, 1), (v, 2), (k.to(other), 1)], 16),
    }
    for case, (tensors, num_copied) in cases.items():
        method, copied = loaded_linear(dtype, (64, 16, 32), tensors)
        assert torch.equal(method.packed, expected), case
        assert copied.any(1).sum() == num_copied, case


def test_parts_that_end_within_a_panel_are_copied_first(dtype) -> None:
    weight = torch.randn(65, 64).to(dtype)
    for sizes, num_copied in (((40, 25), 65), ((48, 17), 0), ((65,), 0)):
        pieces = list(weight.split(sizes))
        method, copied = loaded_linear(
            dtype, sizes, [(piece, i if len(sizes) > 1 else None) for i, piece in enumerate(pieces)]
        )
        assert torch.equal(
            method.packed, panels.pack(weight, library.product_type(dtype, 64), Arena())
        )
        assert copied.any(1).sum() == num_copied


def test_a_rank_packs_its_share_as_it_is_loaded(dtype) -> None:
    weight = torch.randn(96, 64).to(dtype)
    config = VllmConfig.default(tensor_parallel_size=2).with_rank(1)
    method, copied = loaded_linear(dtype, (64, 32), [(weight[:64], 0), (weight[64:], 1)], config)
    share = torch.cat([weight[32:64], weight[80:]])
    assert torch.equal(method.packed, panels.pack(share, library.product_type(dtype, 64), Arena()))
    assert not copied.any()


def test_what_does_not_fit_is_refused(dtype) -> None:
    weight = torch.randn(64, 64).to(dtype)
    for tensors in ([(weight[:63], None)], [(weight[:31], 0)], [(weight.char(), None)]):
        with pytest.raises(CheckpointError, match=r"has shape|is quantized"):
            loaded_linear(dtype, (32, 32), tensors)
