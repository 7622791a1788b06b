"""Quantized weights, by a third party's distribution (tests/plugins/int8): its methods pass the
kit, and models run with them."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit_lm import LLM, SamplingParams, VllmConfig
from toolkit_lm.errors import ConfigError, UnsupportedError
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution import resolve
from toolkit_lm_cli.explanation import explain
from toolkit_lm_decoder.llama import LlamaForCausalLM
from toolkit_lm_devkit import (
    LinearMethodConformance,
    assert_same_logits,
    load_checkpoint,
    logits_of,
    make_checkpoint,
    run_ranks,
)
from toolkit_lm_devkit.sharding import assert_shards
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent / "plugins" / "int8"))

import toolkit_lm_int8
from toolkit_lm_int8.int8 import Int8, quantize
from toolkit_lm_int8.packed import CompressedTensors

GROUP = 64
LEVELS = 16
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "weights": {
                "num_bits": 4,
                "group_size": GROUP,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
            },
        }
    },
}
PROMPTS = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (5, 21, 1)]


def dequantized(weight):
    values, scale = quantize(weight)
    return values.float() * scale[..., None]


def packed(weight, group=GROUP):
    """As compressed-tensors stores int4, value by value: weight_packed, weight_scale, weight_shape;
    and the weight that it stands for."""
    outputs, inputs = weight.shape
    grouped = weight.float().unflatten(1, (-1, group))
    scale = grouped.abs().amax(-1).clamp_min(1e-30) / 7
    values = (grouped / scale[..., None]).round().flatten(1).int()
    stored = torch.zeros(outputs, inputs // 8, dtype=torch.int64)
    for column in range(inputs):
        stored[:, column // 8] |= (values[:, column].long() + 8) << (4 * (column % 8))
    stored = torch.where(stored >= 1 << 31, stored - (1 << 32), stored).int()
    weight = (values.unflatten(1, (-1, group)) * scale[..., None]).flatten(1)
    return {
        "weight_packed": stored,
        "weight_scale": scale,
        "weight_shape": torch.tensor([outputs, inputs]),
    }, weight


class TestInt8Method(LinearMethodConformance):
    quantization = Int8
    kinds = ("linear", "lm_head", "experts")

    def dequantized(self, weight):
        return dequantized(weight)


class TestPackedMethod(LinearMethodConformance):
    quantization = CompressedTensors
    quantization_config = PACKED | {"ignore": []}
    kinds = ("linear", "lm_head", "experts")
    # Shares of 4 ranks are smaller than a group.
    tensor_parallel_sizes = (2, 4)

    def stored(self, weight):
        return packed(weight)[0]

    def dequantized(self, weight):
        return packed(weight)[1]


def test_int8_is_off_by_half_a_scale_at_most():
    weight = torch.randn(40, 64)
    x = torch.randn(7, 64)
    values, scale = quantize(weight)
    assert (values.abs().amax(1) == 127).all()
    assert ((values * scale[:, None] - weight).abs() <= scale[:, None] * 0.5001).all()
    off = (
        F.linear(x.double(), dequantized(weight).double()) - F.linear(x.double(), weight.double())
    ).abs()
    # Half a scale for each input, times its size.
    assert (off <= 0.5001 * scale * x.abs().sum(1, keepdim=True)).all()
    assert torch.equal(quantize(torch.zeros(2, 3))[0], torch.zeros(2, 3, dtype=torch.int8))


def quantize_linears(model):
    """A copy of a transformers model whose linear layers, and experts, have the weights that int8
    stands for."""
    model = copy.deepcopy(model)
    tied = model.get_input_embeddings().weight
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and parameter is not tied:
            assert "norm" not in name
            parameter.data = dequantized(parameter.data).to(parameter.dtype)
    return model


def run(folder, **options):
    options = {
        "device": "cpu",
        "dtype": "float32",
        "max_logprobs": 272,
        "plugins": [toolkit_lm_int8],
        **options,
    }
    with LLM(str(folder), **options) as llm:
        return llm.generate(
            PROMPTS,
            SamplingParams(temperature=0, max_tokens=12, logprobs=272, ignore_eos=True),
            use_tqdm=False,
        )


@pytest.mark.parametrize("tied", [False, True])
def test_a_float_checkpoint_runs_in_int8(make_llama, assert_parity, tied):
    folder, model = make_llama("int8", tie_word_embeddings=tied)
    outputs = run(folder, quantization="int8")
    assert_parity(quantize_linears(model), outputs)
    plain = torch.tensor([output.outputs[0].logprobs[0][5].logprob for output in run(folder)])
    ours = torch.tensor([output.outputs[0].logprobs[0][5].logprob for output in outputs])
    assert (ours != plain).all(), "nothing is quantized"


def test_experts_run_in_int8(tmp_path, assert_parity):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 272,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
    }
    model = MixtralForCausalLM(
        MixtralConfig(
            **sizes, **heads, bos_token_id=0, eos_token_id=1, pad_token_id=2, dtype="float32"
        )
    ).eval()
    folder = make_checkpoint(tmp_path, model)
    assert_parity(quantize_linears(model), run(folder, quantization="int8"))


def write_packed(folder, model, ignored=()):
    """Packs a checkpoint's projections, but for the modules `ignored`; the model gets the weights
    that they stand for. Returns its config.json."""
    weights = {}
    own = dict(model.named_parameters())
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "_proj" not in name or name.rpartition(".")[0] in ignored:
            weights[name] = tensor
            continue
        stored, weight = packed(tensor)
        own[name].data = weight
        weights |= {name.replace("weight", key): value for key, value in stored.items()}
    save_file(weights, folder / "model.safetensors")
    stated = PACKED | {"ignore": ["lm_head", *ignored]}
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": stated}
    (folder / "config.json").write_text(json.dumps(config))
    return config


@pytest.fixture
def copied(make_llama, tmp_path):
    """(folder, transformers model) of a checkpoint that a test may change."""
    folder, model = make_llama("packed", hidden_size=128, intermediate_size=192)
    return shutil.copytree(folder, tmp_path / "packed"), copy.deepcopy(model)


def test_what_a_checkpoint_does_not_quantize_is_named_as_it_names_it(copied, assert_parity):
    """Three modules of the checkpoint are one layer of the model."""
    folder, model = copied
    attention = "model.layers.1.self_attn"
    names = [f"{attention}.{name}_proj" for name in "qkv"]
    write_packed(folder, model, names)
    assert_parity(model, run(folder))


def test_a_layer_that_is_quantized_in_part_is_refused(copied):
    folder, model = copied
    write_packed(folder, model, ["model.layers.1.self_attn.q_proj"])
    with pytest.raises(UnsupportedError, match=r"1\.self_attn\.q_proj, .*some are quantized"):
        run(folder)


def test_a_packed_checkpoint_runs_as_it_states(copied, assert_parity):
    folder, model = copied
    config = write_packed(folder, model)
    assert_parity(model, run(folder))
    found = explain(VllmConfig.make(model=str(folder), device="cpu"), [toolkit_lm_int8])
    assert (found.config.load.load_format, found.config.load.quantization) == (
        "safetensors",
        "compressed-tensors",
    )
    with pytest.raises(
        UnsupportedError, match=r"quantization 'int8' cannot run .*quantized already"
    ):
        run(folder, quantization="int8")
    with pytest.raises(
        UnsupportedError, match=r"quantized weights \('compressed-tensors'\).*Registered: none"
    ):
        explain(VllmConfig.make(model=str(folder), device="cpu"))
    config["quantization_config"]["format"] = "dense"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnsupportedError, match=r"'compressed-tensors' cannot run .*has the format 'dense'"
    ):
        run(folder)


def test_two_ranks_give_the_logits_of_one_and_hold_its_shards(make_llama):
    folder, _ = make_llama("int8-bf16", dtype="bfloat16", tie_word_embeddings=False)
    plugins = Plugins.load(extra=[toolkit_lm_int8])
    tokens = torch.arange(3, 40)

    def load(rank=0, **options):
        return load_checkpoint(
            LlamaForCausalLM, folder, rank=rank, plugins=plugins, quantization="int8", **options
        )

    def compute(rank):
        shard = load(rank, tensor_parallel_size=2)
        return shard, logits_of([shard], tokens)

    (first, ours), (second, theirs) = run_ranks(compute)
    whole = load()
    assert_shards(whole, [first, second])
    held = {
        param.dtype
        for name, param in whole.named_parameters()
        if name.endswith("_proj.weight") or name == "lm_head.weight"
    }
    assert held == {torch.int8}
    from transformers import LlamaForCausalLM as Reference

    with torch.inference_mode():
        expected = quantize_linears(Reference.from_pretrained(folder, dtype=torch.float32))(
            tokens[None]
        ).logits[0]
    for logits in (ours, theirs, logits_of([whole], tokens)):
        assert_same_logits(logits, expected)


@pytest.mark.parametrize("name", ["int8", "none"])
def test_random_weights_of_a_quantization(make_llama, name):
    folder, _ = make_llama("int8", tie_word_embeddings=False)
    assert all(
        len(output.outputs[0].token_ids) == 12
        for output in run(folder, quantization=name, load_format="dummy")
    )


def test_what_cannot_be_is_refused_by_name(make_llama, tmp_path):
    folder, _ = make_llama("int8", tie_word_embeddings=False)
    with pytest.raises(
        UnsupportedError,
        match=r"no loaded plugin has a quantization 'int4'.*Registered: int8, compressed-tensors",
    ):
        resolve(
            VllmConfig.make(model=str(folder), quantization="int4"),
            Plugins.load(extra=[toolkit_lm_int8]),
        )
    with pytest.raises(ConfigError, match="no load format 'gguf' is registered"):
        resolve(VllmConfig.make(model=str(folder), load_format="gguf"), Plugins.load())
    with pytest.raises(
        UnsupportedError, match="'int8' has no method for any layer of TransformersForCausalLM"
    ):
        run(folder, quantization="int8", model_impl="transformers")
    copied = shutil.copytree(folder, tmp_path / "quantized")
    config = json.loads((copied / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "gptq", "bits": 4}
    }
    (copied / "config.json").write_text(json.dumps(config))
    for quantization in ("auto", "none"):
        with pytest.raises(
            UnsupportedError,
            match=r"for the quantized weights \('gptq'\) of .*quantized.*Registered: none",
        ):
            resolve(VllmConfig.make(model=str(copied), quantization=quantization), Plugins.load())
