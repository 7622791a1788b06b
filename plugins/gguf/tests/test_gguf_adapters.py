"""Adapters of llama.cpp, written by the package gguf as its converter does."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit_lm.errors import CheckpointError, UnsupportedError
from toolkit_lm_devkit import make_checkpoint
from toolkit_lm_gguf.adapter import convert
from toolkit_lm_lora.files import AdapterFolder
from transformers import LlamaConfig, LlamaForCausalLM

HEADS = {"q_proj": 4, "k_proj": 2}
SHAPE = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint, and an adapter of it as PEFT saves it."""
    folder = tmp_path_factory.mktemp("saved")
    make_checkpoint(folder / "base", LlamaForCausalLM(LlamaConfig(**SHAPE)))
    (folder / "adapter").mkdir()
    torch.manual_seed(0)
    tensors = {}
    for layer in range(2):
        for name, stem in NAMES.items():
            rank = 2 if stem == "attn_k" else 4
            inputs = 96 if stem == "ffn_down" else 64
            outputs = {"attn_k": 32, "attn_v": 32, "ffn_gate": 96, "ffn_up": 96}.get(stem, 64)
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank)
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 6,
        "target_modules": "all-linear",
        "rank_pattern": {"k_proj": 2},
    }
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    return folder


def permuted(tensor, heads):
    """Rows as llama.cpp's converter writes them."""
    shape = tensor.shape
    return (
        tensor.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    )


def write(path, tensors, kind="adapter", alpha=6.0, dtype=np.float32):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(kind)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor.astype(dtype)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def of_llama_cpp(folder):
    """The adapter's tensors under the names, and in the order, of llama.cpp."""
    found = {}
    for name, tensor in load_file(folder / "adapter" / "adapter_model.safetensors").items():
        _, _, _, _, layer, *module, which, _ = name.split(".")
        array = tensor.numpy()
        if which == "lora_B" and module[-1] in HEADS:
            array = permuted(array, HEADS[module[-1]])
        found[f"blk.{layer}.{NAMES['.'.join(module)]}.weight.{which.lower()}"] = array
    return found


@pytest.mark.parametrize("alpha", [6.0, 0.0])
def test_an_adapter_is_that_which_peft_saved(saved, tmp_path, alpha):
    path = write(tmp_path / "a.gguf", of_llama_cpp(saved), alpha=alpha)
    assert convert(path, SHAPE, tmp_path / "out") == 14
    ours = AdapterFolder(tmp_path / "out")
    theirs = AdapterFolder(saved / "adapter")
    tensors, expected = (
        load_file(folder.path / "adapter_model.safetensors") for folder in (ours, theirs)
    )
    assert tensors.keys() == expected.keys()
    assert all(tensors[name].equal(expected[name]) for name in expected)
    for layer in range(2):
        for name in NAMES:
            module = f"model.layers.{layer}.{name}"
            assert ours.config.targets(module)
            assert ours.config.rank(module) == theirs.config.rank(module)
            scaling = theirs.config.scaling(module) if alpha else 1.0
            assert ours.config.scaling(module) == scaling


def test_the_command(saved, tmp_path, capsys):
    from toolkit_lm_cli.app import run

    path = write(tmp_path / "a.gguf", of_llama_cpp(saved), dtype=np.float16)
    out = tmp_path / "out"
    words = ["lora", "convert", str(saved / "base"), "--adapter", str(path), "--out", str(out)]
    assert run(words) == 0
    assert "an adapter of 14 layers" in capsys.readouterr().out
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 4
    assert run(words) != 0
    assert "is not empty" in capsys.readouterr().err


def test_files_that_are_refused(saved, tmp_path):
    good = of_llama_cpp(saved)
    name = "blk.0.attn_q.weight.lora_b"

    def fails(error, match, tensors=None, **fields):
        path = write(tmp_path / "a.gguf", {**good, **(tensors or {})}, **fields)
        with pytest.raises(error, match=match):
            convert(path, SHAPE, tmp_path / "out")
        assert [one.name for one in tmp_path.iterdir()] == ["a.gguf"]

    fails(CheckpointError, "of type 'model'", kind="model")
    fails(CheckpointError, "no A or B", {"blk.0.attn_norm.weight": np.ones(64)})
    fails(CheckpointError, "no A or B", {"blk.0.other.weight.lora_a": np.ones((4, 64))})
    fails(UnsupportedError, "only linear layers", {"token_embd.weight.lora_a": np.ones((4, 64))})
    fails(CheckpointError, "do not go together", {name: np.ones((64, 3))})
    fails(CheckpointError, "has 60 rows of .* 4 heads", {name: np.ones((60, 4))})
    del good["blk.1.ffn_up.weight.lora_a"]
    fails(CheckpointError, "one of them alone")
