"""Each family of models in GGUF files gives the logits that transformers gives for its weights."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf_files import ARCHITECTURES, write_gguf
from gguf_models import CASES, assert_parity, checkpoint, load, reference
from toolkit_lm.errors import CheckpointError, ConfigError
from toolkit_lm.model import DequantizingMethod, LinearBase
from toolkit_lm_devkit import (
    assert_same_logits,
    logits_of,
    run_ranks,
)
from toolkit_lm_gguf.families import FAMILIES, MIXTRAL
from toolkit_lm_gguf.file import GGUFFile


def test_each_family_has_a_case():
    families = {*(family.model_type for family in FAMILIES.values()), MIXTRAL.model_type}
    assert families <= {model_type for model_type, _ in CASES.values()}
    assert {ARCHITECTURES[model_type] for model_type, _ in CASES.values()} == {*FAMILIES}


@pytest.mark.parametrize("name", CASES)
def test_a_family_gives_the_logits_of_transformers(tmp_path, name):
    model_type, fields = CASES[name]
    folder = checkpoint(tmp_path / "plain", model_type, **fields)
    held = write_gguf(tmp_path / "model.gguf", folder, Type.Q8_0)
    model = load(tmp_path / "model.gguf")
    methods = {
        layer.spec.prefix: type(layer.method)
        for layer in model.modules()
        if isinstance(layer, LinearBase) and not layer.spec.prefix.endswith("gate")
    }
    assert all(issubclass(method, DequantizingMethod) for method in methods.values()), methods
    theirs = reference(folder, held)
    # LongRoPE has a set of factors for short contexts, and one for long ones.
    assert_parity(model, theirs, 200 if "longrope" in name else 60)
    if "longrope" in name:
        assert_parity(load(tmp_path / "model.gguf", max_model_len=128), theirs)


KINDS = {
    "self_attn.q_proj": Type.Q4_K,
    "self_attn.k_proj": Type.Q6_K,
    "self_attn.v_proj": Type.IQ4_XS,
    "self_attn.o_proj": Type.Q3_K,
    "mlp.gate_proj": Type.IQ4_NL,
    "mlp.up_proj": Type.MXFP4,
    "mlp.down_proj": Type.Q5_K,
    "embed_tokens": Type.Q2_K,
    "lm_head": Type.Q5_1,
}
BLOCKS_OF_256 = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "initializer_range": 0.05,
}


def of_module(kinds):
    return lambda name: next((kind for part, kind in kinds.items() if part in name), Type.F32)


@pytest.mark.parametrize("tied", [True, False])
def test_a_layer_may_pack_weights_of_several_types(tmp_path, tied):
    folder = checkpoint(tmp_path / "plain", "llama", tie_word_embeddings=tied, **BLOCKS_OF_256)
    held = write_gguf(tmp_path / "model.gguf", folder, of_module(KINDS))
    model = load(tmp_path / "model.gguf")
    assert_parity(model, reference(folder, held))
    assert (model.lm_head.method is model.model.embed_tokens.method) is tied


def test_a_layer_of_floats_in_part_is_kept_in_floats(tmp_path):
    floats = {"self_attn.k_proj": Type.F16, "mlp.up_proj": Type.BF16}
    folder = checkpoint(tmp_path / "plain", "llama", **BLOCKS_OF_256)
    held = write_gguf(tmp_path / "model.gguf", folder, of_module(KINDS | floats))
    model = load(tmp_path / "model.gguf")
    layer = model.model.layers[0]
    assert not isinstance(layer.self_attn.qkv_proj.method, DequantizingMethod)
    assert isinstance(layer.mlp.down_proj.method, DequantizingMethod)
    assert_parity(model, reference(folder, held))


EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["tensor", "pipeline"])
@pytest.mark.parametrize(("model_type", "own"), [("llama", {}), ("qwen3_moe", EXPERTS)])
def test_two_ranks_give_the_logits_of_one(tmp_path, model_type, own, sizes):
    """Blocks of 32 divide the shares of all layers; the vocabulary is padded."""
    fields = {"hidden_size": 128, "intermediate_size": 192, "vocab_size": 273}
    folder = checkpoint(tmp_path / "plain", model_type, **fields, **own)
    kinds = dict.fromkeys(KINDS, Type.Q5_0)
    kinds |= {"self_attn.v_proj": Type.Q8_0, "mlp.gate_proj": Type.Q4_1, "experts": Type.Q4_0}
    held = write_gguf(tmp_path / "model.gguf", folder, of_module(kinds))
    tokens = torch.arange(3, 63)
    tensor, stages = sizes
    options = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages, "executor": "mp"}

    def compute(rank):
        model = load(tmp_path / "model.gguf", rank, **options)
        return logits_of([model], tokens)

    with torch.inference_mode():
        expected = reference(folder, held)(tokens[None]).logits[0]
    if tensor == 2:
        found = run_ranks(compute)
    else:
        shards = [load(tmp_path / "model.gguf", rank, **options) for rank in range(2)]
        found = [logits_of(shards, tokens)]
    for logits in found:
        assert_same_logits(logits, expected)


def test_a_head_that_config_json_ties_and_the_file_holds_is_not_tied(tmp_path, caplog):
    folder = checkpoint(tmp_path / "plain", "llama")
    held = write_gguf(tmp_path / "model.gguf", folder, Type.Q8_0)
    theirs = reference(folder, held)
    (folder / "model.safetensors").unlink()
    shutil.move(tmp_path / "model.gguf", folder)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    assert_parity(load(folder), theirs)
    assert "they are not tied" in caplog.text


def test_ranks_that_would_cut_a_block_are_refused_with_the_numbers(tmp_path):
    write_gguf(tmp_path / "model.gguf", checkpoint(tmp_path / "plain", "llama"), Type.Q4_0)
    with pytest.raises(
        ConfigError,
        match=r"inputs of model\.layers\.0\.mlp\.down_proj: the share of 48 from 0 on cuts what is "
        r"stored for 32 together",
    ):
        load(tmp_path / "model.gguf", tensor_parallel_size=2, executor="mp")


def test_a_split_checkpoint_and_its_folder_are_the_whole(tmp_path):
    folder = checkpoint(tmp_path / "plain", "llama")
    split = tmp_path / "split"
    split.mkdir()
    held = write_gguf(split / "m.gguf", folder, Type.Q8_0, split=7)
    files = sorted(split.iterdir())
    assert [file.name for file in files] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    (split / "mmproj-m.gguf").touch()
    theirs = reference(folder, held)
    for source in (files[0], files[2], split):
        assert_parity(load(source), theirs)


def test_a_folder_with_a_config_is_read_with_it(tmp_path):
    folder = checkpoint(tmp_path / "plain", "llama")
    held = write_gguf(tmp_path / "model.gguf", folder, Type.Q8_0)
    theirs = reference(folder, held)
    (folder / "model.safetensors").unlink()
    shutil.move(tmp_path / "model.gguf", folder)
    for quantization, is_quantized in (("auto", True), ("none", False)):
        model = load(folder, quantization=quantization)
        assert isinstance(model.lm_head.method, DequantizingMethod) is is_quantized
        assert_parity(model, theirs)


def test_weights_may_be_dequantized_while_they_are_loaded(tmp_path):
    folder = checkpoint(tmp_path / "plain", "llama")
    held = write_gguf(tmp_path / "model.gguf", folder, Type.Q4_0)
    model = load(tmp_path / "model.gguf", quantization="none")
    assert not any(
        isinstance(layer.method, DequantizingMethod)
        for layer in model.modules()
        if isinstance(layer, LinearBase)
    )
    assert_parity(model, reference(folder, held))


def test_scales_that_are_no_numbers_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, checkpoint(tmp_path / "plain", "llama"), Type.Q8_0)
    info = GGUFFile(path).tensors["blk.1.ffn_down.weight"]
    content = bytearray(path.read_bytes())
    content[info.start : info.start + 2] = b"\xff\xff"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj: .*scales of NaN"):
        load(path)
