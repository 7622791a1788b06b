"""Each format: models compute what those of the weights do that the checkpoint stands for."""

from __future__ import annotations

import pytest
import torch
from layouts import FORMATS, gptq, writer
from toolkit_lm.config import VllmConfig
from toolkit_lm_cli.explanation import explain
from toolkit_lm_decoder.llama import LlamaForCausalLM
from toolkit_lm_devkit import assert_same_logits, load_checkpoint, logits_of, run_ranks
from toolkit_lm_quantization_formats.modelopt import ALGORITHMS
from toolkit_lm_quantization_formats.names import READ

TOKENS = torch.arange(3, 40)


def load(checkpoint, model_class=LlamaForCausalLM, **options):
    return load_checkpoint(
        model_class,
        checkpoint.folder,
        dtype="float32",
        # Other kernels round activations, and may hold a weight in another form.
        kernels="torch",
        quantization=checkpoint.method,
        **options,
    )


@torch.inference_mode()
def expected_of(checkpoint):
    return checkpoint.reference(TOKENS[None]).logits[0]


def weights_of(model):
    return {
        module.prefix: module.method.dequantized()
        for module in model.modules()
        if hasattr(module, "method")
    }


def test_each_algorithm_of_modelopt_is_tested():
    stated = {form.config.get("quant_algo", "").upper() for form in FORMATS.values()}
    assert stated >= ALGORITHMS


def test_each_name_that_is_read_is_tested():
    names = {form.config["quant_method"] for form in FORMATS.values()}
    assert names == READ.keys() - {"intel/auto-round", "mxfp4"}


@pytest.mark.parametrize("name", FORMATS)
def test_a_llama_computes_what_its_weights_stand_for(written, name):
    checkpoint = written(name)
    model = load(checkpoint)
    reference = checkpoint.reference.state_dict()
    for prefix, weight in weights_of(model).items():
        parts = {
            "qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "gate_up_proj": ("gate_proj", "up_proj"),
        }
        stem, _, last = prefix.rpartition(".")
        stem += "." if stem else ""
        whole = torch.cat([reference[f"{stem}{part}.weight"] for part in parts.get(last, (last,))])
        torch.testing.assert_close(weight, whole, atol=1e-6, rtol=1e-6)
    assert_same_logits(logits_of([model], TOKENS), expected_of(checkpoint))
    left = {type(m.method).__name__ for m in model.modules() if hasattr(m, "method")}
    assert "SchemeReader" not in left


def parity(checkpoint):
    model = load(checkpoint)
    assert_same_logits(logits_of([model], TOKENS), expected_of(checkpoint))
    return {
        module.prefix: type(module.method).__name__
        for module in model.modules()
        if hasattr(module, "method")
    }


def test_dynamic_of_gptq_gives_layers_bits_of_their_own(mixed):
    """The first pattern that matches counts."""
    stated = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "dynamic": {
            r"-:.*\.o_proj": {},
            r"+:.*\.1\.mlp\.down_proj": {"bits": 8, "group_size": 16},
            r".*\.mlp\.down_proj": {"bits": 3},
            r".*\.0\.self_attn\.": {"group_size": -1},
        },
    }

    def writer_of(key):
        if "o_proj" in key or "lm_head" in key:
            return None
        if "1.mlp.down_proj" in key:
            return writer(gptq, bits=8, group=16)
        if "down_proj" in key:
            return writer(gptq, bits=3)
        return writer(gptq, group=None) if "0.self_attn" in key else gptq

    methods = parity(mixed(stated, writer_of))
    plain = {name for name, method in methods.items() if method == methods["lm_head"]}
    assert plain == {
        "lm_head",
        "model.embed_tokens",
        "model.layers.0.self_attn.o_proj",
        "model.layers.1.self_attn.o_proj",
    }


def test_mixed_precision_of_modelopt_gives_each_layer_its_algorithm(llama, mixed):
    """hf_quant_config.json has its settings one level deeper."""
    by_part = {
        "self_attn.q_proj": "modelopt fp8",
        "self_attn.k_proj": "modelopt fp8",
        "self_attn.v_proj": "modelopt fp8",
        "mlp.gate_proj": "modelopt nvfp4",
        "mlp.up_proj": "modelopt nvfp4",
        "0.mlp.down_proj": "modelopt mxfp8",
        "1.mlp.down_proj": "modelopt w4a16 nvfp4",
        "lm_head": "modelopt fp8 block",
    }

    def form_of(key):
        return next(
            (FORMATS[form] for part, form in by_part.items() if f"{part}.weight" in key), None
        )

    layers = {
        key.removesuffix(".weight"): {"quant_algo": form.config["quant_algo"]}
        for key in llama.state_dict()
        if (form := form_of(key)) is not None
    }
    settings = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    stated = {"quant_method": "modelopt", "quantization": settings}

    def writer_of(key):
        form = form_of(key)
        return None if form is None else form.write

    methods = parity(mixed(stated, writer_of))
    plain = {name for name, method in methods.items() if method == methods["model.embed_tokens"]}
    assert plain == {"model.embed_tokens", *(n for n in methods if n.endswith("o_proj"))}


PACKINGS = [
    "ct int4 zero",
    "ct int4 actorder",
    "ct int3",
    "ct fp8 tensor",
    "gptq v1",
    "gptq desc_act",
    "awq",
    "fp8 block",
    "modelopt nvfp4",
    "bnb nf4",
    "bnb int8",
]
"""A format of each way to store a weight."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in PACKINGS else [pytest.mark.nightly])
        for name in FORMATS
    ],
)
def test_explain_says_what_stores_a_format_and_multiplies_by_it(written, name):
    """Without reading a weight. In which order inputs lie is a value."""
    checkpoint = written(name)
    config = VllmConfig.make(model=str(checkpoint.folder), device="cpu", dtype="float32")
    kinds = {kind.kind: kind for kind in explain(config).weights}
    linear = kinds["linear"]
    assert linear.num_weights and linear.num_bytes < 0.5 * linear.num_float_bytes
    is_ordered = "order" in name or "desc_act" in name
    words = ("not read here",) if is_ordered else ("codes of ", "float8")
    assert linear.methods
    for method in linear.methods:
        assert any(word in method for word in words), method


@pytest.mark.parametrize("name", PACKINGS)
def test_two_ranks_and_two_stages_compute_what_one_does(written, name):
    checkpoint = written(name)

    def compute(rank):
        shard = load(checkpoint, rank=rank, tensor_parallel_size=2)
        return logits_of([shard], TOKENS)

    expected = expected_of(checkpoint)
    for logits in run_ranks(compute):
        assert_same_logits(logits, expected)
    stages = [load(checkpoint, rank=rank, pipeline_parallel_size=2) for rank in range(2)]
    assert_same_logits(logits_of(stages, TOKENS), expected)
