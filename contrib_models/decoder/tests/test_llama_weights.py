"""Checkpoints that a Llama takes, and its errors for those that it cannot take."""

import json
import subprocess
import sys

import pytest
import toolkit_lm_decoder
import torch
from decoder_families import reference_logits
from safetensors.torch import load_file, save_file
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError, UnsupportedError
from toolkit_lm.plugin import ModelRegistry, PluginInfo
from toolkit_lm_decoder.llama import LlamaForCausalLM
from toolkit_lm_devkit import load_checkpoint, logits_of, save_random
from toolkit_lm_weights.safetensors import CheckpointWeights
from transformers import LlamaConfig, LlamaForCausalLM as Reference

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
INPUT_IDS = torch.arange(3, 20)
LAYER = "model.layers.1."


@pytest.fixture
def theirs() -> Reference:
    return Reference(LlamaConfig(**SHAPE))


@pytest.fixture
def folder(theirs, tmp_path):
    return save_random(tmp_path, theirs)


def edit(folder, change):
    """Rewrites the weights of a checkpoint by `change`, a function that edits the mapping of names
    to tensors."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


def edit_config(folder, **changes):
    file = folder / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value != "removed"}))


def assert_same_logits(folder, theirs):
    ours = logits_of([load_checkpoint(LlamaForCausalLM, folder)], INPUT_IDS)
    torch.testing.assert_close(ours, reference_logits(theirs, INPUT_IDS), atol=1e-4, rtol=0)


def pack(tensors):
    for layer in ("model.layers.0.", "model.layers.1."):
        qkv = [tensors.pop(f"{layer}self_attn.{x}_proj.weight") for x in "qkv"]
        gate_up = [tensors.pop(f"{layer}mlp.{x}_proj.weight") for x in ("gate", "up")]
        tensors[f"{layer}self_attn.qkv_proj.weight"] = torch.cat(qkv)
        tensors[f"{layer}mlp.gate_up_proj.weight"] = torch.cat(gate_up)


def test_a_sharded_checkpoint(theirs, tmp_path):
    save_random(tmp_path, theirs, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same_logits(tmp_path, theirs)


def test_a_packed_checkpoint(theirs, folder):
    edit(folder, pack)
    assert_same_logits(folder, theirs)


@pytest.mark.parametrize("rank", [0, 1])
def test_shards_of_packed_and_split_checkpoints_are_equal(rank, folder):
    config = VllmConfig.default(
        json.loads((folder / "config.json").read_text()), tensor_parallel_size=2
    ).with_rank(rank)

    def shard():
        model = LlamaForCausalLM(vllm_config=config)
        model.load_weights(CheckpointWeights(folder))
        return model.state_dict()

    split = shard()
    edit(folder, pack)
    packed = shard()
    assert split.keys() == packed.keys()
    assert all(torch.equal(split[name], packed[name]) for name in split)


def test_stored_rotary_frequencies_are_passed_over(theirs, folder):
    edit(
        folder,
        lambda tensors: tensors.update({f"{LAYER}self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    )
    assert_same_logits(folder, theirs)


def test_a_tied_head_that_is_stored_too_counts_where_it_differs(tmp_path):
    theirs = Reference(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    save_random(tmp_path, theirs)
    edit(
        tmp_path,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        ),
    )
    assert_same_logits(tmp_path, theirs)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.ones(50, 32)}))
    theirs.lm_head.weight = torch.nn.Parameter(torch.ones(50, 32))
    assert_same_logits(tmp_path, theirs)


def test_a_tied_head_can_stand_in_for_the_embedding(tmp_path):
    theirs = Reference(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    save_random(tmp_path, theirs)
    edit(
        tmp_path,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors.pop("model.embed_tokens.weight")}
        ),
    )
    assert_same_logits(tmp_path, theirs)


def test_all_misfits_are_named_at_once(folder):
    def change(tensors):
        del tensors["model.norm.weight"], tensors[f"{LAYER}self_attn.k_proj.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(48, 32)
        tensors[f"{LAYER}mlp.up_proj.weight"] = torch.zeros(47, 32)

    edit(folder, change)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(LlamaForCausalLM, folder)
    assert str(caught.value) == (
        f"LlamaForCausalLM cannot take the weights of {folder / 'model.safetensors'}: "
        f"2 missing: {LAYER}self_attn.k_proj.weight, model.norm.weight; "
        "1 unexpected: model.layers.7.mlp.up_proj.weight; "
        f"1 not fitting: {LAYER}mlp.up_proj.weight has shape [47, 32], not [48, 32]."
    )


def test_a_long_list_of_missing_weights_is_cut(folder):
    edit(
        folder,
        lambda tensors: [
            tensors.pop(name) for name in list(tensors) if LAYER in name or "lm_head" in name
        ],
    )
    with pytest.raises(CheckpointError, match=r"10 missing: (?!.*more)"):
        load_checkpoint(LlamaForCausalLM, folder)
    edit_config(folder, num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"19 missing: .* and 9 more\.$"):
        load_checkpoint(LlamaForCausalLM, folder)


def test_a_quantized_tensor_is_refused(folder):
    name = f"{LAYER}mlp.up_proj.weight"
    edit(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is quantized \(int8\)"):
        load_checkpoint(LlamaForCausalLM, folder)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"hidden_size": "removed"},
            CheckpointError,
            "config.json has no 'hidden_size', which this model needs",
        ),
        (
            {"intermediate_size": "48"},
            CheckpointError,
            "'intermediate_size' must be of type int, not '48'",
        ),
        (
            {"hidden_act": "silo"},
            UnsupportedError,
            "unknown activation 'silo'. Did you mean 'silu'",
        ),
        (
            {"rope_parameters": {"rope_type": "yearn"}},
            UnsupportedError,
            "unknown rope_type 'yearn'. Did you mean 'yarn'",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, CheckpointError, "has no 'factor'"),
    ],
)
def test_a_config_that_does_not_do_is_refused_by_name(folder, changes, error, message):
    edit_config(folder, **changes)
    with pytest.raises(error, match=message):
        load_checkpoint(LlamaForCausalLM, folder)


def test_heads_that_do_not_split_over_the_ranks_are_refused(folder):
    with pytest.raises(
        ConfigError,
        match=r"attention heads of model\.layers\.0\.self_attn\.qkv_proj: 4 cannot be split "
        r".*tensor_parallel_size=3",
    ):
        load_checkpoint(LlamaForCausalLM, folder, tensor_parallel_size=3)


def test_dummy_weights_need_no_files_and_are_the_same_each_time(folder):
    (folder / "model.safetensors").unlink()
    first, second = (
        load_checkpoint(LlamaForCausalLM, folder, load_format="dummy") for _ in range(2)
    )
    logits = logits_of([first], INPUT_IDS)
    assert logits.isfinite().all()
    assert logits.std() > 0
    assert torch.equal(logits, logits_of([second], INPUT_IDS))


def test_the_entry_module_registers_the_class():
    models = ModelRegistry(owner=PluginInfo("decoder", "toolkit-lm-decoder"))
    toolkit_lm_decoder.toolkit_register_models(models)
    assert models.load("LlamaForCausalLM") is LlamaForCausalLM


def test_the_entry_module_is_light():
    code = "import sys, toolkit_lm_decoder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
