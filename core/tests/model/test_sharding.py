"""Layers hold the shard of their rank; the shards of all ranks make the full weight again."""

import pytest
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError, UnsupportedError
from toolkit_lm.model import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    get_activation,
)

RANKS = [1, 2, 4]


def make(layer, *args, rank=0, ranks=1, **kwargs):
    config = VllmConfig.default(tensor_parallel_size=ranks).with_rank(rank)
    return layer(*args, vllm_config=config, prefix="layer", **kwargs)


def shards(layer, *args, ranks, **kwargs):
    return [make(layer, *args, rank=rank, ranks=ranks, **kwargs) for rank in range(ranks)]


def fill(param, loaded, shard_id=None):
    param.weight_loader(param, loaded, shard_id)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("layer", "dim"), [(ColumnParallelLinear, 0), (RowParallelLinear, 1)])
def test_linear_shards_make_the_full_weight(layer, dim, ranks):
    weight = torch.randn(24, 16)
    bias = torch.randn(24)
    layers = shards(layer, 16, 24, bias=True, ranks=ranks)
    for one in layers:
        assert one.weight.shape[dim] == weight.shape[dim] // ranks
        assert tuple(one.weight.shape) == (one.output_size, one.input_size)
        fill(one.weight, weight)
        fill(one.bias, bias)
    assert torch.equal(torch.cat([one.weight for one in layers], dim), weight)
    if layer is ColumnParallelLinear:
        assert torch.equal(torch.cat([one.bias for one in layers]), bias)
    else:
        assert all(torch.equal(one.bias, bias) for one in layers)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("packed", [True, False])
def test_merged_shards_make_each_full_weight(packed, ranks):
    gate = torch.randn(24, 16)
    up = torch.randn(8, 16)
    layers = shards(MergedColumnParallelLinear, 16, [24, 8], ranks=ranks)
    for one in layers:
        if packed:
            fill(one.weight, torch.cat((gate, up)))
        else:
            fill(one.weight, up, 1)
            fill(one.weight, gate, 0)
    split = [one.weight.split([24 // ranks, 8 // ranks]) for one in layers]
    assert torch.equal(torch.cat([part[0] for part in split]), gate)
    assert torch.equal(torch.cat([part[1] for part in split]), up)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_qkv_shards_hold_whole_heads_and_share_those_of_keys(num_kv_heads, ranks):
    head_size = 4
    num_heads = 8
    q, k, v = torch.randn(num_heads * head_size, 16), *torch.randn(2, num_kv_heads * head_size, 16)
    for rank, one in enumerate(
        shards(QKVParallelLinear, 16, head_size, num_heads, num_kv_heads, ranks=ranks)
    ):
        for shard_id, loaded in enumerate((q, k, v)):
            fill(one.weight, loaded, shard_id)
        assert one.num_heads * ranks == num_heads
        assert one.num_kv_heads == max(1, num_kv_heads // ranks)
        got = one.weight.split([one.q_size, one.kv_size, one.kv_size])
        assert torch.equal(got[0], q.chunk(ranks)[rank])
        # The keys that this rank's queries use in the full model.
        group = num_heads // num_kv_heads
        first = rank * one.num_heads // group * head_size
        assert torch.equal(got[1], k[first : first + one.kv_size])
        assert torch.equal(got[2], v[first : first + one.kv_size])


@pytest.mark.parametrize("ranks", RANKS)
def test_vocabulary_shards_make_the_full_weight_and_zeros(ranks):
    weight = torch.randn(5, 8)
    for layer in (VocabParallelEmbedding, ParallelLMHead):
        layers = shards(layer, 5, 8, ranks=ranks)
        for one in layers:
            one.weight.fill_(torch.nan)
            fill(one.weight, weight)
        whole = torch.cat([one.weight for one in layers])
        assert len(whole) % ranks == 0
        assert torch.equal(whole[:5], weight)
        assert not whole[5:].any()


def test_a_tied_head_is_the_embedding():
    embedding = make(VocabParallelEmbedding, 10, 8)
    assert make(ParallelLMHead, 10, 8, tied_to=embedding).weight is embedding.weight


def test_one_rank_computes_what_torch_computes():
    x = torch.randn(3, 16)
    for layer in (ReplicatedLinear, ColumnParallelLinear, RowParallelLinear):
        one = make(layer, 16, 24, bias=True)
        weight = torch.randn(24, 16)
        bias = torch.randn(24)
        fill(one.weight, weight)
        fill(one.bias, bias)
        assert torch.equal(one(x), torch.nn.functional.linear(x, weight, bias))


def test_parameters_have_the_dtype_and_device_asked_for():
    config = VllmConfig.default(dtype="bfloat16")
    with torch.device("meta"):
        layer = QKVParallelLinear(16, 4, 8, 2, bias=True, vllm_config=config, prefix="layer")
    assert {(p.dtype, p.device.type, p.requires_grad) for p in layer.parameters()} == {
        (torch.bfloat16, "meta", False)
    }


@pytest.mark.parametrize(
    ("layer", "args", "message"),
    [
        (
            ColumnParallelLinear,
            (16, 30),
            "outputs of layer: 30 cannot be split evenly over tensor_parallel_size=4",
        ),
        (RowParallelLinear, (30, 16), "inputs of layer: 30 cannot be split evenly"),
        (QKVParallelLinear, (16, 4, 6, 2), "attention heads of layer: 6 cannot be split evenly"),
        (QKVParallelLinear, (16, 4, 12, 6), "KV heads of layer: 6 cannot be split evenly"),
        (
            QKVParallelLinear,
            (16, 4, 12, 3),
            "KV heads of layer: 3 cannot be shared evenly by tensor_parallel_size=4",
        ),
    ],
)
def test_sizes_that_do_not_split_are_refused_by_name(layer, args, message):
    with pytest.raises(ConfigError, match=message):
        make(layer, *args, ranks=4)


@pytest.mark.parametrize("shape", [(23, 16), (24, 15), (24,), (24, 16, 1)])
def test_a_weight_of_another_shape_is_refused(shape):
    with pytest.raises(CheckpointError, match="has shape"):
        fill(make(ColumnParallelLinear, 16, 24, ranks=2).weight, torch.zeros(shape))
    with pytest.raises(CheckpointError, match="has shape"):
        fill(make(MergedColumnParallelLinear, 16, [12, 12], ranks=2).weight, torch.zeros(shape))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [0, 1, 33])
def test_a_packed_weight_gives_the_same_product(rows, dtype):
    config = VllmConfig.default(dtype=dtype)
    layer = ColumnParallelLinear(48, 40, bias=True, vllm_config=config, prefix="layer")
    weight = torch.randn(40, 48)
    bias = torch.randn(40)
    x = torch.randn(rows, 48).to(layer.weight.dtype)
    fill(layer.weight, weight)
    fill(layer.bias, bias)
    plain = layer(x)
    layer.method.process(layer)
    torch.testing.assert_close(layer(x), plain)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu", "silu"])
def test_an_activation_belongs_to_the_product(activation, dtype):
    layer = ColumnParallelLinear(
        48,
        40,
        bias=True,
        activation=activation,
        vllm_config=VllmConfig.default(dtype=dtype),
        prefix="layer",
    )
    weight = torch.randn(40, 48)
    bias = torch.randn(40)
    x = torch.randn(9, 48).to(layer.weight.dtype)
    fill(layer.weight, weight)
    fill(layer.bias, bias)
    expected = get_activation(activation)(torch.nn.functional.linear(x, layer.weight, layer.bias))
    torch.testing.assert_close(layer(x), expected)
    layer.method.process(layer)
    # bfloat16: the product is not rounded before the activation.
    rounding = (
        {"atol": 0.03, "rtol": 0.016} if dtype == "bfloat16" else {"atol": 1e-5, "rtol": 1e-5}
    )
    torch.testing.assert_close(layer(x), expected, **rounding)


def test_an_unknown_activation_is_refused():
    with pytest.raises(UnsupportedError, match=r"'gelo'.*'gelu'"):
        make(ColumnParallelLinear, 8, 8, activation="gelo")


@pytest.mark.parametrize("packed", [True, False])
def test_a_residual_is_added_once(packed):
    layer = make(RowParallelLinear, 48, 40, bias=True)
    weight = torch.randn(40, 48)
    bias = torch.randn(40)
    x = torch.randn(9, 48)
    residual = torch.randn(9, 40)
    fill(layer.weight, weight)
    fill(layer.bias, bias)
    if packed:
        layer.method.process(layer)
    before = residual.clone()
    torch.testing.assert_close(
        layer(x, residual), torch.nn.functional.linear(x, weight, bias) + residual
    )
    assert torch.equal(residual, before)


def test_packing_a_tied_head_leaves_the_embedding():
    embedding = make(VocabParallelEmbedding, 10, 8)
    weight = torch.randn(10, 8)
    fill(embedding.weight, weight)
    head = make(ParallelLMHead, 10, 8, tied_to=embedding)
    head.method.process(head)
    assert torch.equal(embedding(torch.arange(10)), weight)
    torch.testing.assert_close(head(torch.eye(8)), weight.T)
