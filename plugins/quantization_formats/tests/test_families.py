"""Experts, encoders, embeddings and tied heads in the formats."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from layouts import FORMATS, mxfp4
from safetensors.torch import load_file, save_file
from toolkit_lm.errors import CheckpointError
from toolkit_lm_decoder.llama import LlamaForCausalLM
from toolkit_lm_devkit import (
    assert_same_logits,
    hidden_states,
    load_checkpoint,
    logits_of,
    randomize,
    run_ranks,
)
from toolkit_lm_encoder.bert import BertModel
from toolkit_lm_moe.gpt_oss import GptOssForCausalLM
from toolkit_lm_moe.mixtral import MixtralForCausalLM

SHAPE = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
TOKENS = torch.arange(3, 40)


def write(folder, model, name, which, **stated):
    """Two checkpoints of a model: in a format, and with the weights that it stands for."""
    model.save_pretrained(folder / "dense")
    model.save_pretrained(folder / "small")
    weights = load_file(folder / "dense" / "model.safetensors")
    stored = {}
    for key, tensor in weights.items():
        if not which(key, tensor):
            stored[key] = tensor
            continue
        tensors, weights[key] = FORMATS[name].write(tensor.contiguous())
        stored |= {
            key.removesuffix("weight") + one: found.clone() for one, found in tensors.items()
        }
    save_file({k: v.contiguous() for k, v in stored.items()}, folder / "small/model.safetensors")
    save_file(weights, folder / "dense/model.safetensors", metadata={"format": "pt"})
    path = folder / "small" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = FORMATS[name].config | stated
    path.write_text(json.dumps(config))
    return type(model).from_pretrained(folder / "dense", dtype=torch.float32).eval()


def load(model_class, folder, **options):
    config = json.loads((folder / "small" / "config.json").read_text())
    method = config["quantization_config"]["quant_method"]
    return load_checkpoint(
        model_class,
        folder / "small",
        dtype="float32",
        kernels="torch",
        quantization=method,
        **options,
    )


def mixtral():
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **SHAPE | {"intermediate_size": 64}, num_local_experts=4, num_key_value_heads=2
    )
    return transformers.MixtralForCausalLM(config).eval()


def of_projections(key, tensor):
    return tensor.ndim == 2 and "embed" not in key and ".gate." not in key


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        ("ct int4 g32", {"ignore": ["re:.*gate$"]}),
        ("ct nvfp4", {"ignore": ["re:.*gate$"]}),
        ("gptq v1", {}),
        ("awq", {}),
        ("fp8 block", {}),
        ("bnb nf4", {}),
    ],
)
def test_experts(tmp_path, name, stated):
    reference = write(tmp_path, mixtral(), name, of_projections, **stated)
    with torch.inference_mode():
        expected = reference(TOKENS[None]).logits[0]
    assert_same_logits(logits_of([load(MixtralForCausalLM, tmp_path)], TOKENS), expected)


def gpt_oss():
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **SHAPE | {"intermediate_size": 64, "head_dim": 16, "sliding_window": 8},
        num_local_experts=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    made = transformers.GptOssForCausalLM(config).eval()
    randomize(made)
    return made


@pytest.mark.parametrize(
    ("make", "model_class"), [(mixtral, MixtralForCausalLM), (gpt_oss, GptOssForCausalLM)]
)
def test_all_experts_in_one_tensor(tmp_path, make, model_class):
    """MXFP4 as gpt-oss has it, over one and two ranks."""
    model = make()
    model.save_pretrained(tmp_path / "small")
    stored = {}
    dense = dict(model.state_dict())
    for key, tensor in model.state_dict().items():
        if ".experts." not in key or key.endswith("bias"):
            stored[key] = tensor.contiguous()
            continue
        # transformers has gpt-oss's floats as [inputs, outputs]; blocks are of outputs first.
        turned = make is gpt_oss
        experts = [mxfp4((one.mT if turned else one).contiguous()) for one in tensor]
        dense[key] = torch.stack([weight.mT if turned else weight for _, weight in experts])
        blocks = torch.stack([tensors["weight_packed"] for tensors, _ in experts])
        stored[f"{key}_blocks"] = blocks.unflatten(2, (-1, 16))
        stored[f"{key}_scales"] = torch.stack([t["weight_scale"] for t, _ in experts])
    path = tmp_path / "small" / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(config))
    save_file(stored, tmp_path / "small/model.safetensors")
    model.load_state_dict(dense)
    with torch.inference_mode():
        expected = model(TOKENS[None]).logits[0]
    assert_same_logits(logits_of([load(model_class, tmp_path)], TOKENS), expected)

    def compute(rank):
        shard = load(model_class, tmp_path, rank=rank, tensor_parallel_size=2)
        return logits_of([shard], TOKENS)

    for logits in run_ranks(compute):
        assert_same_logits(logits, expected)
    name = next(key for key in stored if key.endswith("blocks"))
    stored[name] = stored[name].flatten(2)
    save_file(stored, tmp_path / "small/model.safetensors")
    with pytest.raises(CheckpointError, match=r"_blocks has shape .*, not \[experts, outputs, "):
        load(model_class, tmp_path)


@pytest.mark.parametrize("name", ["ct W8A8", "gptq v1", "awq"])
def test_an_encoder(tmp_path, name):
    torch.manual_seed(0)
    model = transformers.BertModel(
        transformers.BertConfig(**SHAPE | {"max_position_embeddings": 512}), add_pooling_layer=False
    ).eval()
    reference = write(
        tmp_path,
        model,
        name,
        lambda key, tensor: ".dense.w" in key or (".self." in key and tensor.ndim == 2),
    )
    with torch.inference_mode():
        expected = reference(TOKENS[None]).last_hidden_state[0]
    (found,) = hidden_states([load(BertModel, tmp_path)], [TOKENS])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["ct int4 g32", "ct W8A8", "fbgemm fp8", "bnb int8"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_and_its_head(tmp_path, name, tied):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, num_key_value_heads=2, tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config).eval()
    stated = {}
    if name.startswith("ct"):
        group = FORMATS[name].config["config_groups"]["group_0"]
        stated["config_groups"] = {"group_0": group | {"targets": ["Linear", "Embedding"]}}
    reference = write(tmp_path, model, name, lambda key, tensor: tensor.ndim == 2, **stated)
    with torch.inference_mode():
        expected = reference(TOKENS[None]).logits[0]
    made = load(LlamaForCausalLM, tmp_path)
    assert_same_logits(logits_of([made], TOKENS), expected)
    assert not [name for name, _ in made.named_parameters() if "embed" in name or "head" in name]


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        ("ct W8A8", {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}),
        ("modelopt fp8", {"kv_cache_quant_algo": "FP8"}),
    ],
)
@pytest.mark.parametrize("option", ["auto", "fp8", "model", "int8"])
def test_scales_of_keys_and_values(tmp_path, name, stated, option):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, num_key_value_heads=2)
    write(tmp_path, transformers.LlamaForCausalLM(config), name, of_projections, **stated)
    path = tmp_path / "small/model.safetensors"
    stem = "model.layers.0.self_attn"
    scales = {f"{stem}.k_scale": torch.tensor(0.5), f"{stem}.v_proj.v_scale": torch.tensor([0.25])}
    save_file(load_file(path) | scales, path)
    attention = (
        load(LlamaForCausalLM, tmp_path, kv_cache_dtype=option).model.layers[0].self_attn.attn
    )
    spec = attention.keeps
    kept = {"auto": "layer", "fp8": "layer", "model": "none", "int8": "token"}[option]
    assert spec.scales == kept
    if kept == "layer":
        assert spec.dtype == "float8_e4m3fn"
        assert (attention.k_scale.item(), attention.v_scale.item()) == (0.5, 0.25)
