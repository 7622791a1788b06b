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
from toolkit_lm import LLM, SamplingParams, VllmConfig
from toolkit_lm.errors import ConfigError, UnsupportedError
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution import resolve
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

PROMPTS = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (5, 21, 1)]


def dequantized(weight):
    values, scale = quantize(weight)
    return values.float() * scale[..., None]


class TestInt8Method(LinearMethodConformance):
    quantization = Int8
    kinds = ("linear", "lm_head", "experts")

    def dequantized(self, weight):
        return dequantized(weight)


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
    outputs = run(folder, quantization="absmax8")
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
    assert_parity(quantize_linears(model), run(folder, quantization="absmax8"))


def test_two_ranks_give_the_logits_of_one_and_hold_its_shards(make_llama):
    folder, _ = make_llama("int8-bf16", dtype="bfloat16", tie_word_embeddings=False)
    plugins = Plugins.load(extra=[toolkit_lm_int8])
    tokens = torch.arange(3, 40)

    def load(rank=0, **options):
        return load_checkpoint(
            LlamaForCausalLM, folder, rank=rank, plugins=plugins, quantization="absmax8", **options
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


@pytest.mark.parametrize("name", ["absmax8", "none"])
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
        match=r"no loaded plugin has a quantization 'int5'.*Known: (?!.*gptq).*absmax8",
    ):
        resolve(
            VllmConfig.make(model=str(folder), quantization="int5"),
            Plugins.load(extra=[toolkit_lm_int8]),
        )
    with pytest.raises(ConfigError, match="no load format 'ggml' is registered"):
        resolve(VllmConfig.make(model=str(folder), load_format="ggml"), Plugins.load())
    with pytest.raises(
        UnsupportedError, match="'absmax8' has no method for any layer of TransformersForCausalLM"
    ):
        run(folder, quantization="absmax8", model_impl="transformers")
    copied = shutil.copytree(folder, tmp_path / "quantized")
    config = json.loads((copied / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "own", "bits": 4}
    }
    (copied / "config.json").write_text(json.dumps(config))
    for quantization in ("auto", "none"):
        with pytest.raises(
            UnsupportedError,
            match=r"quantized weights \('own'\) of .*quantized.*Known: .*gptq((?! at load).)*$",
        ):
            resolve(VllmConfig.make(model=str(copied), quantization=quantization), Plugins.load())
