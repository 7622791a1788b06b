"""Norms, activations, values of config.json and layers of a pipeline."""

import pytest
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError, UnsupportedError
from toolkit_lm.model import (
    Absent,
    HFConfig,
    RMSNorm,
    VocabParallelEmbedding,
    gate,
    get_activation,
    layer_index,
    make_layers,
)
from toolkit_lm.model.activation import ACTIVATIONS
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm


def norms(dtype):
    ours = RMSNorm(64, eps=1e-5, vllm_config=VllmConfig.default(dtype=dtype))
    theirs = LlamaRMSNorm(64, eps=1e-5).to(ours.weight.dtype)
    weight = torch.randn(64).to(ours.weight.dtype)
    ours.weight.copy_(weight)
    theirs.weight.data.copy_(weight)
    return ours, theirs


def test_the_norm_is_that_of_transformers():
    ours, theirs = norms("float32")
    x = torch.randn(5, 64) * 10
    torch.testing.assert_close(ours(x), theirs(x).detach(), atol=1e-6, rtol=1e-6)


def test_the_norm_in_bfloat16_is_no_further_from_the_exact_one_than_that_of_transformers():
    ours, theirs = norms("bfloat16")
    x = torch.randn(50, 64).bfloat16() * 10
    exact = nn.functional.rms_norm(x.double(), (64,), ours.weight.double(), 1e-5)
    assert (ours(x).double() - exact).abs().mean() <= (
        theirs(x).detach().double() - exact
    ).abs().mean()


def test_a_residual_is_added_before_the_norm():
    norm, _ = norms("float32")
    x, residual = torch.randn(2, 5, 64)
    normed, total = norm(x, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm(x + residual))


def test_embeddings_are_scaled_and_their_weights_are_not():
    plain, scaled = (
        VocabParallelEmbedding(
            7, 4, scale=scale, vllm_config=VllmConfig.default(), prefix="embed_tokens"
        )
        for scale in (1.0, 3.0)
    )
    weight = torch.randn(7, 4)
    for embedding in (plain, scaled):
        embedding.weight.copy_(weight)
    input_ids = torch.tensor([6, 0, 6])
    assert torch.equal(scaled(input_ids), 3 * plain(input_ids))
    assert torch.equal(scaled.weight, weight)


@pytest.mark.parametrize(
    ("prefix", "index"),
    [("model.layers.3.self_attn", 3), ("layers.12", 12), ("model.layers.3.experts.5.w1", 3)],
)
def test_modules_know_their_layer(prefix, index):
    assert layer_index(prefix) == index


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_transformers(name):
    x = torch.linspace(-12, 12, 101)
    before = x.clone()
    torch.testing.assert_close(get_activation(name)(x), ACT2FN[name](x), atol=1e-5, rtol=1e-5)
    assert torch.equal(x, before)
    first, up = torch.randn(2, 3, 8)
    torch.testing.assert_close(
        gate(torch.cat((first, up), -1), name), get_activation(name)(first) * up
    )


def test_an_unknown_activation_is_refused_with_the_nearest_names():
    with pytest.raises(
        UnsupportedError, match=r"unknown activation 'gelu_tanh'\. Did you mean 'gelu"
    ):
        get_activation("gelu_tanh")


def test_config_values_are_checked():
    config = HFConfig({"size": 3, "theta": 10000, "flag": True, "none": None})
    assert config.require("size", int) == 3
    assert type(config.require("theta", float)) is float
    assert config.get("none", int) is None
    assert config.get("none", int, 5) == config.get("absent", int, 5) == 5
    with pytest.raises(
        CheckpointError,
        match=r"config\.json has no 'sizes', which this model needs\. Did you mean 'size'",
    ):
        config.require("sizes", int)
    with pytest.raises(CheckpointError, match="'flag' must be of type int, not True"):
        config.get("flag", int)


@pytest.mark.parametrize(("count", "ranks"), [(7, 1), (7, 2), (7, 3), (2, 2)])
def test_pipeline_ranks_own_all_layers_once_under_their_names(count, ranks):
    made = []

    def factory(name):
        made.append(name)
        return nn.Linear(2, 2)

    slices = []
    for rank in range(ranks):
        layers = make_layers(
            count,
            factory,
            "model.layers",
            VllmConfig.default(pipeline_parallel_size=ranks).with_rank(rank).parallel,
        )
        assert len(layers) == count
        assert [layer for layer in layers if not isinstance(layer, Absent)] == list(layers.owned)
        slices.append(len(layers.owned))
    assert made == [f"model.layers.{i}" for i in range(count)]
    assert max(slices) - min(slices) <= 1


def test_more_pipeline_ranks_than_layers_are_refused():
    parallel = VllmConfig.default(pipeline_parallel_size=3).parallel
    with pytest.raises(
        ConfigError,
        match=r"the 2 layers of model\.layers cannot be cut into 3 stages: lower "
        r"pipeline_parallel_size",
    ):
        make_layers(2, nn.Identity, "model.layers", parallel)
