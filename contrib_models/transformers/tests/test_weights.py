"""Checkpoints that the fallback takes, its errors for others, and the making of its modules."""

import subprocess
import sys
import threading

import pytest
import toolkit_lm_transformers
import torch
from fallback_harness import save
from safetensors.torch import load_file, save_file
from toolkit_lm.attention import Attention
from toolkit_lm.errors import CheckpointError
from toolkit_lm.plugin import ModelRegistry, PluginInfo
from toolkit_lm_devkit import load_checkpoint
from toolkit_lm_transformers.model import TransformersForCausalLM
from toolkit_lm_transformers.uninitialized import Uninitialized

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
LAYER = "gpt_neox.layers.1.attention"


def load(folder, **options):
    return load_checkpoint(TransformersForCausalLM, folder, **options)


def edit(folder, change):
    """Rewrites the weights of a checkpoint by `change`, a function that edits the mapping of names
    to tensors."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


def assert_same_weights(ours, theirs):
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.state_dict().items())


@pytest.fixture
def theirs(tmp_path):
    return save("GPTNeoX", tmp_path, **SHAPE)


def test_all_tensors_are_there(theirs, tmp_path):
    ours = load(tmp_path)
    assert_same_weights(ours, theirs)
    buffers = dict(theirs.named_buffers())
    assert buffers and dict(ours.named_buffers()).keys() == buffers.keys()
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in ours.named_buffers())


def test_each_attention_module_has_a_layer(theirs, tmp_path):
    layers = [module for module in load(tmp_path).modules() if isinstance(module, Attention)]
    assert [layer.prefix for layer in layers] == ["gpt_neox.layers.0.attention", LAYER]
    assert [
        (layer.params.num_heads, layer.params.num_kv_heads, layer.params.head_size)
        for layer in layers
    ] == [(4, 4, 8)] * 2


def test_what_transformers_passes_over_is_passed_over(theirs, tmp_path):
    stale = {
        f"{LAYER}.{name}": torch.ones(4) for name in ("bias", "masked_bias", "rotary_emb.inv_freq")
    }
    edit(tmp_path, lambda tensors: tensors.update(stale))
    assert_same_weights(load(tmp_path), theirs)


def test_a_name_that_transformers_has_changed_is_known_by_both(theirs, tmp_path):
    assert "embed_out.weight" in load_file(tmp_path / "model.safetensors")
    assert_same_weights(load(tmp_path), theirs)
    edit(
        tmp_path,
        lambda tensors: tensors.update({"lm_head.weight": tensors.pop("embed_out.weight")}),
    )
    assert_same_weights(load(tmp_path), theirs)


def test_experts_are_merged_in_the_order_of_their_numbers(tmp_path):
    theirs = save("Olmoe", tmp_path, num_experts=11, **SHAPE)
    expert = "model.layers.1.mlp.experts.10.gate_proj.weight"
    assert expert in load_file(tmp_path / "model.safetensors")
    assert_same_weights(load(tmp_path), theirs)
    edit(tmp_path, lambda tensors: tensors.pop(expert))
    with pytest.raises(
        CheckpointError,
        match=r"transformers cannot make model\.layers\.1\.mlp\.experts\.gate_up_proj of "
        r".*gate_proj",
    ):
        load(tmp_path)


def test_a_tied_head_needs_no_weight_of_its_own(tmp_path):
    theirs = save("GPTNeoX", tmp_path, tie_word_embeddings=True, **SHAPE)
    assert (
        not {"embed_out.weight", "lm_head.weight"}
        & load_file(tmp_path / "model.safetensors").keys()
    )
    ours = load(tmp_path)
    assert ours.lm_head.weight is ours.gpt_neox.embed_in.weight
    assert_same_weights(ours, theirs)


def test_a_checkpoint_of_the_decoder_alone_gets_its_prefix(tmp_path):
    theirs = save("GPTNeoX", tmp_path, tie_word_embeddings=True, **SHAPE)
    bare = {
        name.removeprefix("gpt_neox."): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(bare, tmp_path / "model.safetensors")
    assert_same_weights(load(tmp_path), theirs)


def test_all_misfits_are_named_at_once(theirs, tmp_path):
    def change(tensors):
        del tensors["gpt_neox.final_layer_norm.bias"]
        tensors["gpt_neox.layers.7.mlp.weight"] = torch.zeros(3)
        tensors[f"{LAYER}.dense.bias"] = torch.zeros(3)

    edit(tmp_path, change)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert str(caught.value) == (
        f"TransformersForCausalLM cannot take the weights of {tmp_path / 'model.safetensors'}: "
        "1 missing: gpt_neox.final_layer_norm.bias; 1 unexpected: gpt_neox.layers.7.mlp.weight; "
        f"1 not fitting: {LAYER}.dense.bias has shape [3], not [32]."
    )


def test_dummy_weights_need_no_files(theirs, tmp_path):
    (tmp_path / "model.safetensors").unlink()
    first, second = (load(tmp_path, load_format="dummy") for _ in range(2))
    assert_same_weights(first, second)


def test_weights_take_the_dtype_of_the_engine(theirs, tmp_path):
    assert {param.dtype for param in load(tmp_path, dtype="bfloat16").parameters()} == {
        torch.bfloat16
    }


def test_no_time_is_spent_on_random_weights():
    before = torch.random.get_rng_state()
    with Uninitialized():
        layer = torch.nn.Linear(3, 4)
        assert torch.equal(torch.nn.init.normal_(torch.ones(2)), torch.ones(2))
        assert torch.equal(torch.nn.init.uniform_(torch.ones(2)), torch.ones(2))
        assert torch.equal(torch.ones(2).uniform_(), torch.zeros(2))
        drawn = []
        other = threading.Thread(
            target=lambda: drawn.append(
                torch.ones(2).normal_(generator=torch.Generator().manual_seed(0))
            )
        )
        other.start()
        other.join()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not torch.equal(drawn[0], torch.ones(2)), "another thread draws as ever"
    assert layer.weight.shape == (4, 3)


def test_the_entry_module_registers_the_fallback():
    models = ModelRegistry(owner=PluginInfo("transformers", "toolkit-lm-transformers"))
    toolkit_lm_transformers.toolkit_register_models(models)
    assert models.fallbacks() == [
        "transformers_image_text",
        "transformers_audio_text",
        "transformers",
        "transformers_encoder_decoder",
        "transformers_speech",
        "transformers_pooling",
    ]
    assert models.load("transformers") is TransformersForCausalLM


def test_the_entry_module_is_light():
    code = (
        "import sys, toolkit_lm_transformers; sys.exit(bool({'torch', 'transformers'} & "
        "set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
