"""Checkpoints and configs that are not as they should be: each format, each fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from layouts import AO_INT8, FORMATS, ao, ao_dtype, ao_object, ct, ct_ints
from safetensors.torch import load_file, save_file
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError, UnsupportedError
from toolkit_lm.plugin import Plugins
from toolkit_lm_decoder.llama import LlamaForCausalLM
from toolkit_lm_devkit import load_checkpoint
from toolkit_lm_quantization_formats.names import READ, REFUSED
from transformers.utils.quantization_config import QuantizationMethod

MODULE = "model.layers.0.mlp.down_proj"
PASSED_OVER = ("input_scale", "input_global_scale")
"""Tensors that may be missing, since nothing is computed with them."""


def missing(tensor):
    return None


def reshaped(tensor):
    return torch.cat([tensor.reshape(1, -1), tensor.reshape(1, -1)], 1)


def of_another_dtype(tensor):
    return tensor.float().to(torch.int16) if tensor.is_floating_point() else tensor.float()


def not_finite(value):
    def change(tensor):
        changed = tensor.clone()
        if tensor.dtype is torch.float8_e4m3fn:
            changed.view(torch.uint8).view(-1)[0] = 0x7F
        elif tensor.dtype is torch.float8_e8m0fnu:
            changed.view(torch.uint8).view(-1)[0] = 255
        else:
            changed.view(-1)[0] = value
        return changed

    return change


def out_of_range(tensor):
    changed = tensor.clone()
    changed.view(-1)[0] = 1000
    return changed


FAULTS = {
    "missing": missing,
    "shape": reshaped,
    "dtype": of_another_dtype,
    "nan": not_finite(float("nan")),
    "infinite": not_finite(float("inf")),
    "range": out_of_range,
    "zero": torch.zeros_like,
}


def applies(fault, key, tensor, stated):
    if fault == "missing":
        free = ("qzeros",) if stated.get("zero_point") is False else ()
        return key not in (*PASSED_OVER, *free, "weight_shape", "g_idx", "weight_format")
    if fault in ("nan", "infinite"):
        return tensor.is_floating_point()
    if fault == "zero":
        return key in ("weight_global_scale", "weight_scale_2")
    if fault == "range":
        return "g_idx" in key or "weight_shape" in key
    return key not in (*PASSED_OVER, "weight_shape", "weight_format")


PLUGINS = Plugins.load()


def load(folder, method, **options):
    options |= {"dtype": "float32", "quantization": method, "plugins": PLUGINS}
    options |= {"kernels": "torch"}
    return load_checkpoint(LlamaForCausalLM, folder, **options)


@pytest.mark.parametrize("name", FORMATS)
def test_random_weights_of_a_format(written, name):
    checkpoint = written(name)
    model = load(checkpoint.folder, checkpoint.method, load_format="dummy")
    projection = model.model.layers[0].mlp.down_proj
    weight = projection.method.dequantized()
    assert weight.shape == (64, 128) and weight.any()
    # A random exponent of two may be any.
    assert "mxfp" in name or weight.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_each_fault_of_each_tensor_is_told(written, tmp_path, name):
    checkpoint = written(name)
    weights = load_file(checkpoint.folder / "model.safetensors")
    (tmp_path / "config.json").write_bytes((checkpoint.folder / "config.json").read_bytes())
    keys = [key for key in weights if key.startswith(f"{MODULE}.")]
    tried = 0
    for key in keys:
        for fault, change in FAULTS.items():
            name_of = key.removeprefix(f"{MODULE}.")
            if not applies(fault, name_of, weights[key], FORMATS[name].config):
                continue
            changed = change(weights[key])
            others = {k: v for k, v in weights.items() if k != key}
            if changed is not None:
                others[key] = changed
            save_file(others, tmp_path / "model.safetensors")
            with pytest.raises(CheckpointError) as found:
                load(tmp_path, checkpoint.method)
            text = str(found.value)
            assert MODULE in text and len(text) < 2000, (key, fault, text)
            # Without its scales, a weight is one of floats that has another dtype.
            # Scales that are quantized themselves are checked once they are made.
            tensor = key.rpartition(".")[2].removeprefix("nested_")
            assert tensor in text or "is quantized" in text, (key, fault, text)
            tried += 1
    assert tried > len(keys)


@pytest.mark.parametrize("name", FORMATS)
def test_plain_weights_under_a_config_that_names_a_format(written, llama, tmp_path, name):
    """A format whose config says which layers it quantizes is contradicted. Others follow the
    tensors, and have no method for any layer."""
    checkpoint = written(name)
    llama.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes((checkpoint.folder / "config.json").read_bytes())
    with pytest.raises((CheckpointError, UnsupportedError)) as found:
        load(tmp_path, checkpoint.method)
    text = str(found.value)
    assert "config.json says that it is quantized" in text or "no method for any layer" in text


@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_that_is_quantized_in_part(written, llama, tmp_path, name):
    checkpoint = written(name)
    weights = load_file(checkpoint.folder / "model.safetensors")
    module = "model.layers.0.self_attn.k_proj"
    kept = {k: v for k, v in weights.items() if not k.startswith(f"{module}.")}
    kept[f"{module}.weight"] = llama.state_dict()[f"{module}.weight"]
    save_file(kept, tmp_path / "model.safetensors")
    config = checkpoint.config()
    if "config_groups" in config["quantization_config"]:
        config["quantization_config"]["ignore"] = [module]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=r"q_proj as .*k_proj as floats, .*v_proj as"):
        load(tmp_path, checkpoint.method)


SLOW = "(?=.*" * 9 + "!" + ")" * 9
"""A pattern that `re` takes hours for."""
MANY = "is no regular expression that can be used: .*takes more than 20000 steps"
WRONG = {
    "gptq": [
        ({"bits": 5}, "bits is 5, and what is read is 2, 3, 4, 8"),
        ({"bits": "4"}, r"Expected `int`, got `str` - at `\$.bits`"),
        ({"group_size": 0}, "group_size must be -1 or at least 1, not 0"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"is_marlin_format": True}, "is_marlin_format"),
        ({"dynamic": {"-:(": {}}}, "is no regular expression"),
        ({"dynamic": {f"+:{SLOW}": {}}}, f"dynamic: '\\+:.*{MANY}"),
        ({"group_size": 48}, "groups of 48 inputs do not divide its 64 inputs"),
    ],
    "awq": [
        ({"bits": 8}, "bits is 8"),
        ({"version": "gemv"}, "version is 'gemv', and what is read is 'gemm'"),
        ({"zero_point": 3}, "Expected `bool`, got `int`"),
        ({"group_size": 48}, "groups of 48 inputs do not divide its 64 inputs"),
    ],
    "auto-round": [
        ({"packing_format": "own"}, "packing_format is 'own'"),
        ({"data_type": "mx_fp"}, "data_type is 'mx_fp'"),
        ({"extra_config": {"(": {}}}, "is no regular expression"),
        ({"extra_config": {SLOW: {}}}, f"extra_config: .*{MANY}"),
        ({"group_size": 48}, "groups of 48 inputs do not divide its 64 inputs"),
    ],
    "fp8": [
        ({"activation_scheme": "own"}, "activation_scheme is 'own'"),
        ({"weight_block_size": [128]}, "weight_block_size must be two sizes"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
    ],
    "fbgemm_fp8": [({"fmt": "e5m2"}, "fmt is 'e5m2'")],
    "modelopt": [
        ({"quant_algo": "INT4_AWQ"}, "quant_algo is 'INT4_AWQ'"),
        ({"kv_cache_quant_algo": "NVFP4"}, "kv_cache_dtype='model'"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "own"}}},
            "quantized_layers: a: quant_algo is 'own'",
        ),
    ],
    "bitsandbytes": [
        ({"load_in_4bit": True, "load_in_8bit": True}, "one of load_in_4bit and load_in_8bit"),
        ({"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type is 'int4'"),
    ],
    "compressed-tensors": [
        ({"format": "own"}, "format is 'own'"),
        ({"format": None}, "format is ''"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format is"),
        ({"transform_config": {"config_groups": {"a": {}}}}, "transform_config rotates"),
        ({"ignore": ["re:("]}, "is no regular expression"),
        ({"ignore": [f"re:{SLOW}"]}, f"targets or ignore: 're:.*{MANY}"),
        ({"config_groups": {"a": {}}}, "missing required field `targets`"),
        (ct("pack-quantized", ct_ints(num_bits=9)), "weights.num_bits is 9"),
        (ct("pack-quantized", ct_ints(type="float")), "weights.type is 'float'"),
        (ct("pack-quantized", ct_ints(strategy="block")), "weights.strategy is 'block'"),
        (ct("int-quantized", ct_ints(strategy="own")), "weights.strategy is 'own'"),
        (ct("float-quantized", ct_ints(type="float", num_bits=4)), "weights.num_bits is 4"),
        (ct("float-quantized", ct_ints(type="float", num_bits=8, strategy="block")), "two sizes"),
        (ct("nvfp4-pack-quantized", ct_ints()), "nvfp4-pack-quantized has floats of 4 bits"),
        (ct("pack-quantized", ct_ints(group_size=48)), "groups of 48 inputs do not divide"),
        (
            {"kv_cache_scheme": {"num_bits": 8, "type": "int"}},
            "kv_cache_scheme is no float8 .*kv_cache_dtype='model'",
        ),
    ],
    "torchao": [
        ({"quant_type": {}}, "quant_type has no 'default'"),
        ({"quant_type": {"default": 3}}, "Expected `object`, got `int`"),
        (ao("Int4WeightOnlyConfig"), "quant_type is 'Int4WeightOnlyConfig'"),
        (ao("Int8WeightOnlyConfig", 1), "Int8WeightOnlyConfig is of version 1"),
        (
            ao("Float8WeightOnlyConfig", weight_dtype=ao_dtype("float8_e5m2")),
            "weight_dtype is 'float8_e5m2'",
        ),
        (ao("IntxWeightOnlyConfig", weight_dtype=ao_dtype("uint4")), "weight_dtype is 'uint4'"),
        (
            ao("IntxWeightOnlyConfig", intx_packing_format=ao_dtype("OPAQUE")),
            "intx_packing_format is 'OPAQUE'",
        ),
        (
            ao("IntxWeightOnlyConfig", granularity=ao_object("PerAxis", axis=1)),
            "axis of granularity is 1",
        ),
        (
            ao("Int8WeightOnlyConfig", granularity=ao_object("PerToken")),
            "granularity is 'PerToken'",
        ),
        (
            ao("Int8WeightOnlyConfig", granularity=ao_object("PerGroup", group_size="a")),
            "Expected `int`, got `str`",
        ),
        (
            ao("Int8WeightOnlyConfig", granularity=ao_object("PerGroup", group_size=48)),
            "groups of 48 inputs do not divide its 64 inputs",
        ),
        (ao("FqnToConfig", fqn_to_config={"re:(": AO_INT8}), "is no regular expression"),
        (ao("FqnToConfig", fqn_to_config={f"re:{SLOW}": AO_INT8}), f"fqn_to_config: .*{MANY}"),
    ],
    "mxfp4": [({"modules_to_not_convert": 3}, r"Expected `array \| null`, got `int`")],
}
"""Format -> what its config says, and what the error does."""


def test_wrong_configs_of_all_formats_are_tried():
    assert WRONG.keys() == READ.keys() - {"intel/auto-round"}


@pytest.mark.parametrize(
    ("method", "stated", "message"),
    [(method, stated, message) for method, cases in WRONG.items() for stated, message in cases],
)
def test_a_wrong_config_is_told(written, tmp_path, method, stated, message):
    names = [name for name, form in FORMATS.items() if form.config["quant_method"] == method]
    checkpoint = written(names[0] if names else "ct int4 g32")
    config = checkpoint.config()
    if method == "mxfp4":
        config["quantization_config"] = {}
    config["quantization_config"] |= {"quant_method": method, **stated}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(checkpoint.folder / "model.safetensors")
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        load(tmp_path, method)


BY_ANOTHER = {"gguf"}
"""Formats of other distributions."""


def test_each_name_that_transformers_has_is_read_or_refused_with_a_tool():
    known = {method.value for method in QuantizationMethod}
    assert len(known) >= 26
    assert known - BY_ANOTHER <= READ.keys() | REFUSED.keys()
    assert not READ.keys() & REFUSED.keys()
    page = (Path(__file__).parents[3] / "docs" / "quantization.md").read_text()
    assert all(f"`{name}`" in page for name in (READ | REFUSED) if name != "intel/auto-round")


@pytest.mark.parametrize("name", REFUSED)
def test_a_format_that_is_not_read_is_refused_with_its_tool(name):
    registry = PLUGINS.quantization
    config = VllmConfig.default({"quantization_config": {"quant_method": name}})
    refusal = registry.ask(name, config, by_name=True)
    assert repr(name) in refusal and "llm-compressor" in refusal


@pytest.mark.parametrize("name", sorted(READ.keys() | REFUSED.keys()))
def test_a_checkpoint_of_floats_has_no_format(name):
    refusal = PLUGINS.quantization.ask(name, VllmConfig.default({}), by_name=True)
    assert refusal.startswith("its weights are not quantized")


CUTS = {
    "ct int4 g32": (1, r"inputs of .*down_proj: the share of 24 from 24 on cuts .* 32 together"),
    "gptq v1": (1, r"inputs of .*down_proj: the share of 24 from 24 on cuts .* 32 together"),
    "awq": (1, r"inputs of .*down_proj: the share of 24 from 24 on cuts .* 32 together"),
    "fp8 block": (1, r"inputs of .*down_proj: the share of 24 from 24 on cuts .* 32 together"),
    "gptq int3": (0, r"outputs of .*qkv_proj: the share of 16 from 0 on cuts .* 32 together"),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_share_that_cuts_what_is_stored_together_is_refused(written, tmp_path, name):
    rank, message = CUTS[name]
    checkpoint = written(name)
    config = checkpoint.config() | {"intermediate_size": 96, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(checkpoint.folder / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, checkpoint.method, rank=rank, tensor_parallel_size=4)
