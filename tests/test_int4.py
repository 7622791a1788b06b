"""Int4 weights in groups, by a third party's distribution (tests/plugins/int4): its method passes
the kit, models compute what those of the dequantized weights do, and planted faults are found."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import CheckpointError, ConfigError, UnsupportedError
from toolkit_lm.kv import FullSpec, WindowSpec
from toolkit_lm.model import Shard
from toolkit_lm.plugin import Plugins
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
from toolkit_lm_moe.mixtral import MixtralForCausalLM

sys.path.insert(0, str(Path(__file__).parent / "plugins" / "int4"))

import toolkit_lm_int4
from toolkit_lm_int4.cache import Int8Backend, in_int8, round_trip
from toolkit_lm_int4.int4 import GROUP, Int4, Int4Method, dequantize, quantize

STATED = {"quant_method": "minmax4", "group_size": GROUP}
PLUGINS = Plugins.load(extra=[toolkit_lm_int4])
TOKENS = torch.arange(3, 40)


class TestInt4Method(LinearMethodConformance):
    quantization = Int4
    quantization_config = STATED
    kinds = ("linear", "lm_head", "experts")

    def stored(self, weight):
        return quantize(weight)

    def dequantized(self, weight):
        return dequantize(**quantize(weight))


def test_int4_is_off_by_half_a_scale_at_most():
    """Value by value, with what is stored read by arithmetic of python's integers."""
    weight = torch.randn(3, 2 * GROUP)
    # All above zero, all below it, and nothing.
    weight[0, :GROUP] += 9
    weight[1, :GROUP] -= 9
    weight[2, :GROUP] = 0
    stored = quantize(weight)
    assert stored["zeros"][:, 0].tolist()[:2] == [0, 15]
    shown = dequantize(**stored)
    for row in range(3):
        for column in range(2 * GROUP):
            word = stored["qweight"][row, column // 8].item() % 2**32
            group = column // GROUP
            value = word // 16 ** (column % 8) % 16 - stored["zeros"][row, group].item()
            scale = stored["scales"][row, group].item()
            assert shown[row, column].item() == pytest.approx(value * scale, abs=1e-6)
            # A zero that is rounded may cost half a step too, at the ends.
            assert abs(shown[row, column] - weight[row, column]) <= scale * 1.0001


def write(folder, model_folder):
    """(int4, dense): the checkpoint with all weights in int4 but for embeddings, and one with the
    weights that they stand for."""
    found = []
    tensors = load_file(model_folder / "model.safetensors")
    small = {
        name for name, tensor in tensors.items() if tensor.ndim == 2 and "embed_tokens" not in name
    }
    for kind in ("int4", "dense"):
        copy = shutil.copytree(model_folder, folder / kind)
        found.append(copy)
        weights = {}
        for name, tensor in tensors.items():
            if name not in small:
                weights[name] = tensor
            elif kind == "dense":
                weights[name] = dequantize(**quantize(tensor))
            else:
                stem = name.removesuffix("weight")
                weights |= {stem + key: value for key, value in quantize(tensor).items()}
        save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((found[0] / "config.json").read_text())
    config["quantization_config"] = STATED
    (found[0] / "config.json").write_text(json.dumps(config))
    return found


@pytest.fixture(scope="module")
def llama(make_llama, tmp_path_factory):
    source, _ = make_llama("int4", intermediate_size=128, tie_word_embeddings=False)
    return write(tmp_path_factory.mktemp("int4"), source)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=272,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_local_experts=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        dtype="float32",
    )
    model = transformers.MixtralForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("mixtral")
    return write(folder, make_checkpoint(folder / "source", model))


def load(model_class, folder, **options):
    quantization = "minmax4" if folder.name == "int4" else "none"
    return load_checkpoint(
        model_class,
        folder,
        plugins=PLUGINS,
        dtype="float32",
        quantization=quantization,
        **options,
    )


def expected_of(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(TOKENS[None]).logits[0]


def assert_computes(model_class, folders):
    """A model in int4 computes the logits of ours, and of transformers', with the dense weights."""
    small, dense = folders
    made = load(model_class, small)
    layers = [module for module in made.modules() if hasattr(module, "method")]
    plain = [layer.prefix for layer in layers if not isinstance(layer.method, Int4Method)]
    assert plain == ["model.embed_tokens"]
    logits = logits_of([made], TOKENS)
    # Another kernel multiplies by the dense weights, in another order.
    ours = logits_of([load(model_class, dense)], TOKENS)
    torch.testing.assert_close(logits, ours, atol=1e-5, rtol=0)
    assert_same_logits(logits, expected_of(dense))


def test_fused_projections_and_a_head_run_in_int4(llama):
    assert_computes(LlamaForCausalLM, llama)


def test_experts_run_in_int4(mixtral):
    assert_computes(MixtralForCausalLM, mixtral)


def test_the_engine_runs_the_checkpoint_as_it_states(llama, assert_parity):
    small, dense = llama
    options = {"device": "cpu", "dtype": "float32", "max_logprobs": 272, "num_kv_blocks": 32}
    with LLM(str(small), plugins=[toolkit_lm_int4], **options) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": TOKENS.tolist()}],
            SamplingParams(temperature=0, max_tokens=4, logprobs=272, ignore_eos=True),
            use_tqdm=False,
        )
    reference = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    assert_parity(reference.eval(), outputs)


def test_two_ranks_give_the_logits_of_one_and_hold_its_shards(llama):
    small, dense = llama

    def compute(rank):
        shard = load(LlamaForCausalLM, small, rank=rank, tensor_parallel_size=2)
        return shard, logits_of([shard], TOKENS)

    (first, ours), (second, theirs) = run_ranks(compute)
    assert_shards(load(LlamaForCausalLM, small), [first, second])
    expected = expected_of(dense)
    for logits in (ours, theirs):
        assert_same_logits(logits, expected)


def test_what_cannot_be_is_refused_with_the_numbers(make_llama, tmp_path):
    small, _ = write(tmp_path, make_llama("int4-cut", intermediate_size=96)[0])
    cut = r"inputs of model\.layers\.0\.mlp\.down_proj: the share of 48 from 0 on cuts .* 32 "
    with pytest.raises(ConfigError, match=cut):
        load(LlamaForCausalLM, small, tensor_parallel_size=2)
    assert Int4.refuses(_Config({})) == (
        "its weights are not quantized, and int4 is read from a checkpoint"
    )
    assert Int4.refuses(_Config({"quantization_config": STATED | {"group_size": 64}})) == (
        "its groups have 64 inputs, not 32"
    )


class _Config:
    def __init__(self, hf_config):
        self.hf_config = hf_config


def test_a_tied_head_is_the_embedding_and_no_other(make_llama, tmp_path):
    """One in int4 that config.json ties all the same is refused by its names."""
    small, dense = write(tmp_path, make_llama("int4-tied", tie_word_embeddings=True)[0])
    assert_same_logits(logits_of([load(LlamaForCausalLM, small)], TOKENS), expected_of(dense))
    weights = load_file(small / "model.safetensors")
    head = quantize(weights["model.embed_tokens.weight"])
    weights |= {f"lm_head.{key}": value for key, value in head.items()}
    save_file(weights, small / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"3 unexpected: lm_head\.qweight, .*scales"):
        load(LlamaForCausalLM, small)


# A KV cache in int8


class RoundTrip(transformers.DynamicCache):
    """Keeps what an int8 cache would give back."""

    def update(self, k, v, layer, *args, **kwargs):
        return super().update(round_trip(k), round_trip(v), layer, *args, **kwargs)


def keeping_int8(folder, copy):
    copy = shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] = STATED | {"kv_cache": "int8"}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def generate(folder, plugin=toolkit_lm_int4, first=3, **options):
    options |= {"device": "cpu", "dtype": "float32", "max_logprobs": 272, "num_kv_blocks": 64}
    with LLM(str(folder), plugins=[plugin], **options) as llm:
        return llm.generate(
            [{"prompt_token_ids": list(range(first, first + length))} for length in (5, 37, 1)],
            SamplingParams(temperature=0, max_tokens=6, logprobs=272, ignore_eos=True),
            use_tqdm=False,
        )


def test_the_cache_has_a_scale_for_each_token_and_head(llama, assert_parity, tmp_path):
    small, dense = llama
    folder = keeping_int8(small, tmp_path / "int8")
    model = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()

    def reference(tokens):
        return model(tokens, past_key_values=RoundTrip(config=model.config))

    outputs = generate(folder, max_num_batched_tokens=8, max_num_seqs=8)
    assert_parity(reference, outputs)
    assert_parity(reference, generate(folder))
    with pytest.raises(AssertionError):
        assert_parity(model, outputs)


def test_layers_with_a_window_keep_int8_too(make_windowed, assert_parity, tmp_path):
    small, dense = write(tmp_path, make_windowed()[0])
    folder = keeping_int8(small, tmp_path / "int8")
    model = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()

    def reference(tokens):
        return model(tokens, past_key_values=RoundTrip(config=model.config))

    # From the token 3 on, one value lies where two ways to add round it to another int8.
    outputs = generate(folder, first=60, max_num_batched_tokens=8, max_num_seqs=8)
    assert_parity(reference, outputs)


class WeightsOnly:
    """The plugin without its backend."""

    name = "weights-only"
    toolkit_register_quantization = staticmethod(toolkit_lm_int4.toolkit_register_quantization)
    toolkit_register_kv_kinds = staticmethod(toolkit_lm_int4.toolkit_register_kv_kinds)


def test_other_backends_refuse_the_cache(llama, tmp_path):
    folder = keeping_int8(llama[0], tmp_path / "int8")
    with pytest.raises(UnsupportedError, match=r"sdpa.*no kernel for a cache in int8, only for"):
        generate(folder, WeightsOnly())


def test_a_page_in_int8_is_as_large_as_its_tensors():
    sizes = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": "float32"}
    full = in_int8(FullSpec(**sizes))
    window = in_int8(WindowSpec(**sizes, window=12))
    assert (window.kind, window.window, window.dtype) == ("int8_window", 12, "int8")
    assert full.page_bytes == window.page_bytes == 2 * 16 * 2 * (8 + 4)
    tensors = Int8Backend.page_layout(full)
    assert [tensor.shape for tensor in tensors] == [(2, 16, 2, 8), (2, 16, 2)]
    assert window.first_needed(40) == WindowSpec(**sizes, window=12).first_needed(40)


# Planted faults


def kit_of(method):
    class Wrong(Int4):
        def method(self, spec):
            return method()

    return type("KitOf", (TestInt4Method,), {"quantization": Wrong})()


class NextGroup(Int4Method):
    def dequantized(self):
        return dequantize(self.qweight, self.scales.roll(1, 1), self.zeros)


class NoZero(Int4Method):
    def dequantized(self):
        return dequantize(self.qweight, self.scales, torch.zeros_like(self.zeros))


class FirstShare(Int4Method):
    """Each rank has the scales of the first one's inputs."""

    def create(self, layer, spec):
        super().create(layer, spec)
        inputs = spec.inputs
        first = replace(spec, inputs=Shard(inputs.full, 0, inputs.size))
        layer.scales.weight_loader = first.loader(group=GROUP)


@pytest.mark.parametrize("fault", [NextGroup, NoZero])
@pytest.mark.parametrize("layer", ["qkv", "row", "lm_head", "expert"])
def test_the_kit_finds_a_wrong_group_and_a_zero_that_is_ignored(fault, layer):
    kit_of(Int4Method).test_the_product_is_that_of_the_dequantized_weight(layer, torch.float32)
    with pytest.raises(AssertionError):
        kit_of(fault).test_the_product_is_that_of_the_dequantized_weight(layer, torch.float32)


def test_the_kit_finds_the_share_of_another_rank():
    with pytest.raises(AssertionError):
        kit_of(FirstShare).test_the_ranks_compute_what_one_does("row", 2)
    with pytest.raises(AssertionError):
        kit_of(FirstShare).test_shards_make_up_the_whole("row", 2)


def test_the_scales_of_another_expert_are_found(mixtral, monkeypatch):
    """The kit has one expert: a model finds it."""
    create = Int4Method.create
    before = {}

    def of_the_one_before(self, layer, spec):
        create(self, layer, spec)
        if spec.kind == "experts":
            self.scales = before.get(spec.shape, layer.scales)
            before[spec.shape] = layer.scales

    monkeypatch.setattr(Int4Method, "create", of_the_one_before)
    with pytest.raises(AssertionError, match="not close"):
        assert_computes(MixtralForCausalLM, mixtral)
    assert len(before) == 2
