"""Models with quantized weights of all kinds: whole layers in one call, warm prefixes, ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.model import (
    DequantizingMethod,
    FusibleLayer,
    LinearMethod,
    LinearSpec,
    Quantization,
    QuantizedReader,
    QuantizedWeight,
    UnquantizedMethod,
    new_parameter,
)
from toolkit_lm.plugin import Plugins, QuantizationRegistry, hookimpl
from toolkit_lm_cpu.float8 import Float8Panels
from toolkit_lm_cpu.fused import FusedDecoderLayer
from toolkit_lm_cpu.layers import CpuKernels
from toolkit_lm_cpu.library import refusal
from toolkit_lm_cpu.quantized import QuantizedPanels
from toolkit_lm_decoder.llama import LlamaForCausalLM
from toolkit_lm_devkit import (
    assert_same_logits,
    load_checkpoint,
    logits_of,
    make_checkpoint,
    randomize,
    run_ranks,
)
from toolkit_lm_devkit.generation import Generated, generate
from torch import Tensor, nn

pytestmark = pytest.mark.skipif(refusal() is not None, reason=str(refusal()))
SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
FAMILIES = {
    "llama": ("Llama", {"attention_bias": True}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": 30, "sliding_window": 20}),
    "olmo2": ("Olmo2", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
}
PROMPTS = [[5, 6, 7], list(range(9, 99)), [8], list(range(200, 240))]
BATCHED = {"max_num_batched_tokens": 50, "max_num_seqs": 4}
"""Prompts in chunks, and several rows a step."""


def rounded(weight: Tensor, bits: int, group: int) -> QuantizedWeight:
    """A weight in symmetric codes of 8 bits; of 4 bits with zeros."""
    parts = weight.float().unflatten(1, (-1, group))
    if bits == 8:
        scales = parts.abs().amax(2).clamp(min=1e-9) / 127
        codes = (parts / scales.unsqueeze(2)).round() + 128
        return QuantizedWeight(codes=codes.flatten(1).byte(), bits=8, scales=scales)
    low = parts.amin(2).clamp(max=0)
    scales = (parts.amax(2).clamp(min=0) - low).clamp(min=1e-9) / 15
    zeros = (-low / scales).round()
    codes = (parts / scales.unsqueeze(2) + zeros.unsqueeze(2)).round().clamp(0, 15)
    return QuantizedWeight(codes=codes.flatten(1).byte(), bits=4, scales=scales, zeros=zeros)


class RoundingReader(QuantizedReader):
    bits = 8

    def make_parameters(self, spec: LinearSpec) -> dict[str, nn.Parameter]:
        return {"weight": new_parameter(spec.shape, spec.dtype, spec.loader())}

    def read(self, spec: LinearSpec, loaded: Mapping[str, Tensor]) -> QuantizedWeight:
        inputs = spec.shape[1]
        group = inputs if self.bits == 8 else 32
        return rounded(loaded["weight"], self.bits, group)


class Float8Reader(RoundingReader):
    def read(self, spec: LinearSpec, loaded: Mapping[str, Tensor]) -> QuantizedWeight:
        scales = loaded["weight"].float().abs().amax(1, keepdim=True).clamp(min=1e-9) / 448
        codes = (loaded["weight"] / scales).to(torch.float8_e4m3fn)
        return QuantizedWeight(codes=codes, bits=8, scales=scales)


class Int8(Quantization):
    """All weights in 8 bits, with a scale per output."""

    def bits(self, spec: LinearSpec) -> int | None:
        return 8

    def method(self, spec: LinearSpec) -> LinearMethod | None:
        bits = self.bits(spec)
        if bits is None:
            return None
        reader = RoundingReader(self.kernels)
        reader.bits = bits
        return reader


class Int4(Int8):
    """All weights in 4 bits, in groups of 32, with zeros."""

    def bits(self, spec: LinearSpec) -> int | None:
        return 4


class Mixed(Int8):
    """A layer with weights in the model's dtype, in 8 and in 4 bits."""

    def bits(self, spec: LinearSpec) -> int | None:
        if "o_proj" in spec.prefix or "gate_up" in spec.prefix:
            return None
        return 4 if "down" in spec.prefix or spec.kind == "lm_head" else 8


class Float8(Quantization):
    """All weights in float8, with a scale per output."""

    def method(self, spec: LinearSpec) -> LinearMethod | None:
        return Float8Reader(self.kernels)


class Plugin:
    name = "rounding"

    @hookimpl
    def toolkit_register_quantization(self, quantization: QuantizationRegistry) -> None:
        for kind in ("Int8", "Int4", "Mixed", "Float8"):
            quantization.add(kind.lower(), f"{__name__}:{kind}")


PLUGIN = Plugin()


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory) -> Path:
    return make_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"))


def make_model(name: str, folder: Path) -> Path:
    family, fields = FAMILIES[name]
    model_class = getattr(transformers, f"{family}ForCausalLM")
    torch.manual_seed(0)
    made = model_class(model_class.config_class(**SHAPE | fields))
    randomize(made)
    return make_checkpoint(folder, made)


def complete(model: Path, quantization: str, prompts=PROMPTS, **options) -> Generated:
    return generate(
        model,
        prompts,
        vocab_size=SHAPE["vocab_size"],
        max_tokens=8,
        plugins=[PLUGIN],
        quantization=quantization,
        **options,
    )


def same(one: Generated, other: Generated) -> bool:
    return one.token_ids == other.token_ids and all(
        torch.equal(a, b) for a, b in zip(one.logprobs, other.logprobs, strict=True)
    )


@pytest.mark.parametrize("quantization", ["int8", "int4", "mixed", "float8"])
def test_layers_in_one_call_give_what_their_modules_do(monkeypatch, model, quantization) -> None:
    """And a sequence alone gives what it gives beside others, in chunks."""
    calls = []
    layers = []
    call = FusedDecoderLayer.__call__
    layer_call = FusibleLayer.__call__
    with monkeypatch.context() as patch:
        patch.setattr(
            FusedDecoderLayer,
            "__call__",
            lambda self, *given: calls.append(call(self, *given)) or calls[-1],
        )
        patch.setattr(
            FusibleLayer,
            "__call__",
            lambda self, *given: layers.append(self) or layer_call(self, *given),
        )
        fused = complete(model, quantization, dtype="bfloat16", **BATCHED)
        assert calls and len(calls) == len(layers) and all(done is not None for done in calls)
        patch.setattr(CpuKernels, "fuse", lambda self, parts: None)
        assert same(complete(model, quantization, dtype="bfloat16", **BATCHED), fused)
    alone = complete(model, quantization, PROMPTS[1:2], dtype="bfloat16")
    assert same(alone, Generated(fused.token_ids[1:2], fused.logprobs[1:2], 0))


def load(folder: Path, quantization: str, **options):
    return load_checkpoint(
        LlamaForCausalLM,
        folder,
        plugins=Plugins.load(extra=[PLUGIN]),
        quantization=quantization,
        dtype="float32",
        **options,
    )


TOKENS = torch.arange(3, 60)


@pytest.mark.parametrize("quantization", ["int8", "int4", "mixed"])
@pytest.mark.parametrize("name", ["llama", "tied"])
def test_logits_are_close_to_those_of_dequantized_weights(tmp_path, name, quantization) -> None:
    """All layers are quantized, with the embedding and the head."""
    folder = make_model(name, tmp_path)
    made = load(folder, quantization)
    methods = [module.method for module in made.modules() if hasattr(module, "method")]
    kinds = {type(method) for method in methods}
    assert QuantizedPanels in kinds and not kinds & {DequantizingMethod, UnquantizedMethod}
    if name == "tied":
        assert len(set(map(id, methods))) == len(methods) - 1
    plain = load(folder, quantization, kernels="torch")
    found = logits_of([made], TOKENS)
    exact = logits_of([plain], TOKENS)
    # Nine products follow each other, and each is off by 0.7% with random inputs.
    assert (found - exact).norm() < 9 * 0.007 * exact.norm()


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_logits_of_float8_are_those_of_its_numbers(tmp_path, name) -> None:
    folder = make_model(name, tmp_path)
    made = load(folder, "float8")
    methods = {type(module.method) for module in made.modules() if hasattr(module, "method")}
    assert methods == {Float8Panels}
    plain = load(folder, "float8", kernels="torch")
    assert_same_logits(logits_of([made], TOKENS), logits_of([plain], TOKENS))


@pytest.mark.parametrize("quantization", ["int4", "mixed"])
def test_two_ranks_give_the_logits_of_one(llama, quantization) -> None:
    """Groups of inputs are cut between ranks as a whole. Each rank finds levels by the greatest
    scale of its own inputs."""

    def compute(rank: int) -> Tensor:
        return logits_of([load(llama, quantization, rank=rank, tensor_parallel_size=2)], TOKENS)

    exact = logits_of([load(llama, quantization, kernels="torch")], TOKENS)
    for logits in [logits_of([load(llama, quantization)], TOKENS), *run_ranks(compute)]:
        assert (logits - exact).norm() < 9 * 0.007 * exact.norm()


def test_a_warm_prefix_gives_what_a_cold_one_does(llama) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5)
    prompt = [{"prompt_token_ids": list(range(9, 99))}]
    with LLM(
        str(llama), plugins=[PLUGIN], quantization="int4", dtype="bfloat16", block_size=16
    ) as llm:
        cold, warm = (llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(2))
    assert not cold.num_cached_tokens and warm.num_cached_tokens
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids
    assert cold.outputs[0].logprobs == warm.outputs[0].logprobs
