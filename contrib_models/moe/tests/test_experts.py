"""Routed experts: each token's experts, their products in one go and one by one, and their
shards."""

import pytest
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError, UnsupportedError
from toolkit_lm.model import (
    ChangingMethod,
    DequantizingMethod,
    Kernels,
    LinearBase,
    QuantizedWeight,
)
from toolkit_lm_moe.experts import RoutedExperts, route_top_k, split_experts
from torch.nn import functional as F

EXPERTS = 6
HIDDEN = 16
INNER = 32
GATE_UP = torch.randn(EXPERTS, 2 * INNER, HIDDEN) / 4
DOWN = torch.randn(EXPERTS, HIDDEN, INNER) / 4


def make(*, rank=0, ranks=1, dtype="float32", inner=INNER, grouped=False, **kwargs):
    """`grouped`: as on other devices than the CPU."""
    config = VllmConfig.default(tensor_parallel_size=ranks, dtype=dtype).with_rank(rank)
    layer = RoutedExperts(
        EXPERTS, HIDDEN, inner, vllm_config=config, prefix="mlp.experts", **kwargs
    )
    assert layer.stacked is None
    if grouped:
        layer.stacked = layer.stack()
    return layer


def fill(layer, gate_up=GATE_UP, down=DOWN):
    for name, param in layer.named_parameters():
        expert, projection, _ = name.split(".")
        param.weight_loader(param, (gate_up if projection == "gate_up_proj" else down)[int(expert)])
    return layer


def ready(*weights, grouped, **kwargs):
    """A layer whose weights are loaded."""
    layer = fill(make(grouped=grouped, **kwargs), *weights)
    return layer if grouped else process(layer)


def process(layer):
    for module in layer.modules():
        if isinstance(module, LinearBase):
            module.method.process(module)
    return layer


def naive(x, experts, weights, gate_up=GATE_UP, down=DOWN):
    """In float64, token by token."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for expert, weight in zip(experts[token].tolist(), weights[token].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            out[token] += weight * (down[expert].double() @ (F.silu(gate) * up))
    return out


def random_routing(tokens, top_k):
    return route_top_k(torch.randn(tokens, EXPERTS), top_k, normalize=True)


ROUTINGS = {
    "mixed": random_routing(37, 2),
    "one token": random_routing(1, 3),
    "one expert each": random_routing(20, 1),
    "all experts": random_routing(9, EXPERTS),
    "all to one expert": (torch.full((11, 1), 4), torch.rand(11, 1)),
    "two experts of six": (torch.tensor([[1, 5]]).expand(8, -1), torch.rand(8, 2)),
    "nobody": (torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2)),
}


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "one by one"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_product_is_the_weighted_sum_over_experts(routing, grouped):
    experts, weights = ROUTINGS[routing]
    x = torch.randn(len(experts), HIDDEN)
    layer = ready(grouped=grouped)
    assert (layer.stacked is not None) == grouped
    out = layer(x, experts, weights)
    assert out.shape == x.shape
    torch.testing.assert_close(out.double(), naive(x, experts, weights), atol=1e-5, rtol=0)


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "one by one"])
def test_bfloat16_sums_experts_in_float32(grouped):
    # Few tokens leave it to chance: of 40, the ratio below is anywhere from 0.4 to 1.1.
    experts, weights = random_routing(2000, 4)
    x = torch.randn(2000, HIDDEN).bfloat16()
    gate_up = GATE_UP.bfloat16()
    down = DOWN.bfloat16()
    out = ready(grouped=grouped, dtype="bfloat16")(x, experts, weights)
    assert out.dtype == torch.bfloat16
    exact = naive(x, experts, weights, gate_up, down)
    # transformers computes it so: the products of the experts are summed in bfloat16.
    eager = torch.zeros_like(x)
    for k in range(4):
        gate, up = torch.einsum("toh,th->to", gate_up[experts[:, k]], x).chunk(2, dim=-1)
        eager += (
            torch.einsum("thi,ti->th", down[experts[:, k]], F.silu(gate) * up)
            * weights[:, k, None].bfloat16()
        )
    assert (out - exact).square().mean() <= (eager - exact).square().mean()


@pytest.mark.parametrize("hidden_act", ["gelu_pytorch_tanh", "relu"])
def test_the_activation_is_the_one_asked_for(hidden_act):
    experts, weights = random_routing(5, 2)
    x = torch.randn(5, HIDDEN)
    outs = [
        ready(grouped=grouped, activation=hidden_act)(x, experts, weights)
        for grouped in (True, False)
    ]
    torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=0)
    assert (outs[0] - naive(x, experts, weights)).abs().max() > 1e-2
    with pytest.raises(UnsupportedError, match="unknown activation 'silo'"):
        make(activation="silo")


def test_sizes_that_no_grouped_product_takes_are_computed_one_by_one():
    experts, weights = random_routing(7, 2)
    x = torch.randn(7, HIDDEN)
    gate_up = torch.randn(EXPERTS, 2 * 7, HIDDEN)
    down = torch.randn(EXPERTS, HIDDEN, 7)
    layer = fill(make(inner=7), gate_up, down)
    assert layer.stacked is None
    torch.testing.assert_close(
        layer(x, experts, weights).double(),
        naive(x, experts, weights, gate_up, down),
        atol=1e-4,
        rtol=0,
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_make_the_full_weights(ranks):
    layers = [fill(make(rank=rank, ranks=ranks, grouped=True)) for rank in range(ranks)]
    for expert in range(EXPERTS):
        parts = [layer.get_submodule(str(expert)) for layer in layers]
        for half, full in enumerate(GATE_UP[expert].chunk(2)):
            assert torch.equal(
                torch.cat([part.gate_up_proj.weight.chunk(2)[half] for part in parts]), full
            )
        assert torch.equal(torch.cat([part.down_proj.weight for part in parts], 1), DOWN[expert])
    for layer in layers:
        assert layer.stacked[0].shape == (EXPERTS, 2 * INNER // ranks, HIDDEN)
        assert layer.stacked[1].shape == (EXPERTS, HIDDEN, INNER // ranks)


def test_gate_and_up_can_be_loaded_apart():
    layer = make(rank=1, ranks=2, grouped=True)
    weight = layer.get_parameter("3.gate_up_proj.weight")
    gate, up = GATE_UP[3].chunk(2)
    weight.weight_loader(weight, up, 1)
    weight.weight_loader(weight, gate, 0)
    assert torch.equal(weight, torch.cat((gate[INNER // 2 :], up[INNER // 2 :])))
    assert torch.equal(layer.stacked[0][3], weight)


def test_inner_dimensions_that_do_not_split_are_refused_by_name():
    with pytest.raises(
        ConfigError,
        match=r"inner dimensions of mlp\.experts: 32 cannot be split evenly over "
        r"tensor_parallel_size=5",
    ):
        make(ranks=5)


def test_a_weight_of_another_shape_is_refused():
    weight = make(ranks=2).get_parameter("0.down_proj.weight")
    with pytest.raises(CheckpointError, match=r"has shape \[16, 16\], not \[16, 32\]"):
        weight.weight_loader(weight, torch.zeros(HIDDEN, INNER // 2))


def test_weights_are_held_once():
    layer = make(grouped=True)
    assert {param.untyped_storage().data_ptr() for param in layer.parameters()} == {
        weight.untyped_storage().data_ptr() for weight in layer.stacked
    }


@pytest.mark.parametrize("normalize", [True, False])
def test_routing_takes_the_likeliest_experts(normalize):
    logits = torch.randn(50, EXPERTS).bfloat16()
    experts, weights = route_top_k(logits, 3, normalize=normalize)
    assert weights.dtype == torch.float32
    probabilities = logits.double().softmax(-1)
    chosen = probabilities.gather(1, experts)
    rest = probabilities.scatter(1, experts, 0)
    assert (chosen.min(-1).values >= rest.max(-1).values).all()
    expected = chosen / chosen.sum(-1, keepdim=True) if normalize else chosen
    torch.testing.assert_close(weights.double(), expected, atol=1e-6, rtol=0)


def test_tensors_of_all_experts_are_cut():
    others = [
        ("a.mlp.gate_up_proj.weight", GATE_UP[0]),
        ("a.mlp.experts.1.down_proj.weight", DOWN[1]),
        ("experts.down_proj", DOWN[0]),
    ]
    cut = list(
        split_experts(
            [*others, ("a.mlp.experts.gate_up_proj", GATE_UP), ("a.mlp.experts.down_proj", DOWN)]
        )
    )
    expected = [
        *others,
        *((f"a.mlp.experts.{i}.gate_up_proj.weight", GATE_UP[i]) for i in range(EXPERTS)),
        *((f"a.mlp.experts.{i}.down_proj.weight", DOWN[i]) for i in range(EXPERTS)),
    ]
    assert [name for name, _ in cut] == [name for name, _ in expected]
    assert all(
        torch.equal(ours, theirs) for (_, ours), (_, theirs) in zip(cut, expected, strict=True)
    )


class Grouping(Kernels):
    """Multiplies by dequantized weights, an expert at a time, and counts."""

    calls = 0

    def group(self, methods):
        def product(rows, ends, biases, epilogue):
            Grouping.calls += 1
            out = torch.full((len(rows), methods[0].dequantized().shape[0]), torch.nan)
            begin = 0
            for number, end in enumerate(ends.tolist()):
                bias = None if biases is None else biases[number]
                out[begin:end] = F.linear(rows[begin:end], methods[number].dequantized(), bias)
                begin = end
            return epilogue.finish(out)

        return product


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("ranks", [1, 2], ids=["whole", "divided"])
def test_kernels_may_multiply_quantized_experts_in_one(monkeypatch, bias, ranks):
    """They are asked once, after loading. Hooks, and methods that are wrapped later, are obeyed."""
    monkeypatch.setattr(Grouping, "calls", 0)
    config = VllmConfig.default(
        tensor_parallel_size=ranks, dtype="float32", enable_expert_parallel=ranks > 1
    ).with_rank(ranks - 1)
    layer = RoutedExperts(EXPERTS, HIDDEN, INNER, bias=bias, vllm_config=config, prefix="mlp")
    for module in layer.modules():
        if not isinstance(module, LinearBase):
            continue
        if bias:
            torch.nn.init.normal_(module.bias)
        codes = torch.randint(0, 256, module.spec.shape, dtype=torch.uint8)
        scales = torch.full((len(codes), 1), 1 / 300)
        weight = QuantizedWeight(codes=codes, bits=8, scales=scales)
        module.method = DequantizingMethod(weight, torch.float32)
    layer.requires_grad_(False)
    experts, weights = ROUTINGS["mixed"]
    x = torch.randn(len(experts), HIDDEN)
    alone = layer.compute(x, experts, weights)
    assert layer._products == ()
    layer._products = None
    layer.kernels = Grouping()
    torch.testing.assert_close(layer.compute(x, experts, weights), alone)
    torch.testing.assert_close(layer.compute(x, experts, weights), alone)
    assert Grouping.calls == 4
    held = layer.get_submodule(str(layer.held[0]))
    seen = []
    hook = held.register_forward_hook(lambda *given: seen.append(given))
    torch.testing.assert_close(layer.compute(x, experts, weights), alone)
    assert seen and Grouping.calls == 4
    hook.remove()
    torch.testing.assert_close(layer.compute(x, experts, weights), alone)
    assert Grouping.calls == 6
    held.down_proj.wrap(Doubling)
    assert not torch.allclose(layer.compute(x, experts, weights), alone)
    assert Grouping.calls == 6


class Doubling(ChangingMethod):
    """Twice what the other method gives."""

    def change(self, x, out, rows):
        return out.mul_(2)
