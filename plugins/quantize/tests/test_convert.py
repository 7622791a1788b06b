"""Checkpoints that `toolkit quantize` writes: transformers reads them, by
compressed-tensors, and we do."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.plugin import Plugins
from toolkit_lm_decoder.llama import LlamaForCausalLM
from toolkit_lm_devkit import assert_same_logits, load_checkpoint, logits_of, make_checkpoint
from toolkit_lm_quantize.compressed_tensors import compress
from toolkit_lm_quantize.convert import write_checkpoint
from toolkit_lm_quantize.schemes import SCHEMES, Fp8Scheme, Int4Scheme, Int8Scheme
from toolkit_lm_weights.registry import CheckpointWriterRegistry

TOKENS = torch.arange(3, 40)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=272,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    return make_checkpoint(tmp_path_factory.mktemp("llama"), model), model


def logits_with(model, tensors):
    """Logits of the transformers model with other weights."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model.load_state_dict(before | tensors)
        logits = model(TOKENS[None]).logits[0]
        model.load_state_dict(before)
    return logits


def stands_for(weight, scheme):
    """The values of the codes that are written, by arithmetic of our own."""
    scales = scheme.quantize(weight)[1]
    codes = scheme.pack_codes(scheme.encode(weight, scales))
    return scheme.weight(codes, scales).dequantized()


MIXED = (
    "--quantization-override",
    "*.down_proj=int8",
    "--quantization-override",
    "model.layers.0.self_attn.qkv_proj=fp8",
    "--quantization-skip",
    "model.layers.1.self_attn.o_proj",
)


def mixed(name):
    if "1.self_attn.o_proj" in name:
        return None
    if "down_proj" in name:
        return Int8Scheme()
    return Fp8Scheme() if re.search(r"0.self_attn.[qkv]_", name) else Int4Scheme()


@pytest.mark.parametrize("name", [*SCHEMES, "mixed"])
def test_transformers_reads_what_is_written(llama, toolkit, tmp_path, name):
    folder, model = llama
    flags = ("--quantization", "int4", *MIXED) if name == "mixed" else ("--quantization", name)
    out = tmp_path / "out"
    done = toolkit("quantize", str(folder), *flags, "--out", str(out), "--shard-gib", "0.001")
    assert done.code == 0, done.err
    read = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        found = read(TOKENS[None]).logits[0]

    def scheme_of(weight):
        if not re.search(r"layers.*_proj", weight):
            return None
        return mixed(weight) if name == "mixed" else SCHEMES[name]()

    expected = {
        weight: stands_for(tensor, scheme)
        for weight, tensor in model.state_dict().items()
        if (scheme := scheme_of(weight)) is not None
    }
    torch.testing.assert_close(found, logits_with(model, expected), atol=1e-4, rtol=1e-4)
    made = load_checkpoint(
        LlamaForCausalLM,
        out,
        dtype="float32",
        kernels="torch",
        quantization="compressed-tensors",
    )
    assert_same_logits(logits_of([made], TOKENS), found)
    assert {path.name for path in folder.iterdir()} <= {path.name for path in out.iterdir()}


def test_large_checkpoints_have_several_files(llama, toolkit, tmp_path):
    folder, _ = llama
    out = tmp_path / "out"
    options = ("--quantization", "int8", "--out", str(out))
    assert toolkit("quantize", str(folder), *options, "--shard-gib", "0.001").code == 0
    whole = load_file(out / "model.safetensors")
    config = VllmConfig.make(model=str(folder), quantization="int8")
    split = tmp_path / "split"
    write_checkpoint(config, Plugins.load(), split, format="compressed-tensors", shard_bytes=50_000)
    index = json.loads((split / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: load_file(split / name) for name in set(index.values())}
    assert len(files) > 2
    assert index.keys() == whole.keys()
    assert all(torch.equal(files[index[name]][name], tensor) for name, tensor in whole.items())
    umask = out.joinpath("config.json").stat().st_mode
    assert {path.stat().st_mode for path in split.glob("*.safetensors")} == {umask}


@pytest.mark.parametrize("group", [32, 64, 128])
def test_scales_of_int4_have_16_bits_where_that_is_good_enough(group):
    """Very small ones and very large ones have 32."""
    weight = torch.randn(8, 256)
    weight[1] = 0
    weight[2] *= 1e-7
    weight[3] *= 1e7
    scheme = Int4Scheme(group=group)
    codes, scales = scheme.quantize(weight)
    halves = scales.half().float()
    assert torch.equal(halves[[0, 1, 4, 5, 6, 7]], scales[[0, 1, 4, 5, 6, 7]])
    assert not torch.equal(halves[2], scales[2])
    assert scales[3].isfinite().all()
    off = scheme.weight(scheme.pack_codes(codes), scales).dequantized() - weight
    assert (off.norm(dim=1) <= 0.15 * weight.norm(dim=1)).all()


@pytest.mark.parametrize("name", SCHEMES)
def test_scales_have_the_dtype_of_the_weight_and_codes_are_the_nearest(name):
    weight = torch.randn(16, 64).bfloat16()
    weight[3] = 0
    scheme = SCHEMES[name]()
    stored = compress(weight, scheme)
    scales = stored["weight_scale"]
    assert scales.dtype == torch.bfloat16
    exact = weight.float()
    codes = scheme.pack_codes(scheme.encode(exact, scales.float()))
    off = (scheme.weight(codes, scales.float()).dequantized() - exact).abs()
    # In fp8 a code of the greatest exponent is off by 16.
    most = {"int8": 0.51, "int4": 1.01, "fp8": 16.01}[name]
    size = scheme.group or 64
    # Values past the last code may be off by more than half a step: by an eighth of the greatest.
    assert (off <= scales.float().abs().repeat_interleave(size, 1) * most).all()
    assert not off[3].any()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "needs to know how"),
        (
            ["--quantization", "int8", "--format", "gptq"],
            "no checkpoint writer 'gptq'",
        ),
        (["--quantization", "int8", "--quantization-skip", "nothing"], "'nothing' names no layer"),
    ],
)
def test_what_cannot_be_is_refused(llama, toolkit, tmp_path, flags, words):
    done = toolkit("quantize", str(llama[0]), *flags, "--out", str(tmp_path / "out"))
    assert done.code != 0
    assert words in " ".join(done.err.split())
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_is_left_alone(llama, toolkit, tmp_path):
    (tmp_path / "mine").write_text("mine")
    done = toolkit("quantize", str(llama[0]), "--quantization", "int8", "--out", str(tmp_path))
    assert done.code != 0
    assert "is no empty folder" in " ".join(done.err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_nan_is_refused_and_leaves_nothing(llama, toolkit, tmp_path):
    folder, _ = llama
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in folder.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "out"
    done = toolkit("quantize", str(broken), "--quantization", "int8", "--out", str(out))
    assert done.code != 0
    assert "model.layers.1.mlp.up_proj.weight holds values that are not finite" in " ".join(
        done.err.split()
    )
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


PAGE = Path(__file__).parents[3] / "docs" / "hooks" / "toolkit_register_checkpoint_writers.md"


def test_toolkit_register_checkpoint_writers_as_on_its_page(llama, tmp_path, monkeypatch):
    plugin, writer = (types.ModuleType(name) for name in ("mine", "toolkit_lm_mine.writer"))
    for module, block in ((plugin, 2), (writer, 3)):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(PAGE.read_text().split("```python\n")[block].split("```")[0], module.__dict__)
    plugins = Plugins.load(extra=[plugin])
    config = VllmConfig.make(model=str(llama[0]), quantization="int8")
    out = tmp_path / "out.json"
    found = write_checkpoint(config, plugins, out, format="mine", shard_bytes=1)
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert len(json.loads(out.read_text())) == found.quantized["int8"] == 16
    assert found.kept == []
    with pytest.raises(UnsupportedError, match="this format holds int8, and not fp8"):
        write_checkpoint(
            config.replace(quantization="fp8"),
            plugins,
            tmp_path / "other.json",
            format="mine",
            shard_bytes=1,
        )


def test_the_guide_has_a_row_for_each_writer():
    guide = (PAGE.parents[1] / "quantization.md").read_text()
    names = {
        entry.key for entry in Plugins.load().brought_registry(CheckpointWriterRegistry).entries()
    }
    assert {"compressed-tensors", "gguf"} <= names
    assert [name for name in names if f"\n| `{name}` |" not in guide] == []
