"""Shards, token types, the names that checkpoints use, and what is refused."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import toolkit_lm_encoder
import torch
from encoder_families import (
    BERT_LIKE,
    MAX_MODEL_LEN,
    VARIANTS,
    VOCAB_SIZE,
    load,
    make_checkpoint,
    our_class,
    random_sequences,
)
from safetensors.torch import load_file, save_file
from toolkit_lm.errors import CheckpointError, ConfigError, UnsupportedError
from toolkit_lm.model import Model
from toolkit_lm.plugin import ModelRegistry, PluginInfo
from toolkit_lm.pooling import Pooler
from toolkit_lm_devkit import Computed, hidden_states, hidden_states_of_ranks

SEQUENCES = random_sequences()


def states_of(theirs, sequence, **kwargs):
    with torch.inference_mode():
        return theirs(sequence[None], **kwargs).last_hidden_state[0]


def first_variant(family):
    return next(iter(VARIANTS[family].values()))


def edited(folder, change=dict, **config_changes):
    """The same folder with other weights (`change` maps the tensors) and config; a value of None
    takes a key out."""
    values = json.loads((folder / "config.json").read_text()) | config_changes
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in values.items() if value is not None})
    )
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    return folder


def assert_same_states(models, theirs):
    ours = torch.cat(hidden_states(models, SEQUENCES))
    torch.testing.assert_close(
        ours, torch.cat([states_of(theirs, s) for s in SEQUENCES]), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("family", list(VARIANTS))
def test_pipeline_stages(tmp_path, family):
    theirs = make_checkpoint(f"{family}Model", first_variant(family), tmp_path)
    cls = our_class(f"{family}Model")
    assert_same_states(
        [load(cls, tmp_path, rank=rank, pipeline_parallel_size=2) for rank in (0, 1)], theirs
    )


def test_pipeline_stages_with_a_convolution(tmp_path):
    """The first stage alone has it."""
    theirs = make_checkpoint("DebertaV2Model", VARIANTS["DebertaV2"]["convolution"], tmp_path)
    cls = our_class("DebertaV2Model")
    assert_same_states(
        [load(cls, tmp_path, rank=rank, pipeline_parallel_size=2) for rank in (0, 1)], theirs
    )


@pytest.mark.slow
def test_two_ranks(tmp_path):
    theirs = {}
    for family in VARIANTS:
        (tmp_path / family).mkdir()
        theirs[family] = make_checkpoint(f"{family}Model", first_variant(family), tmp_path / family)
    work = [Computed(our_class(f"{family}Model"), tmp_path / family) for family in VARIANTS]
    states = hidden_states_of_ranks(work, SEQUENCES, max_model_len=MAX_MODEL_LEN)
    for model, of_ranks in zip(theirs.values(), states, strict=True):
        expected = torch.cat([states_of(model, s) for s in SEQUENCES])
        for ours in of_ranks:
            torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["Bert", "NomicBert"])
def test_token_types(tmp_path, family):
    theirs = make_checkpoint(f"{family}Model", first_variant(family), tmp_path)
    types = [(torch.arange(len(s)) > len(s) // 2).long() for s in SEQUENCES]
    ours = hidden_states(
        [load(our_class(f"{family}Model"), tmp_path)], SEQUENCES, token_type_ids=torch.cat(types)
    )
    for sequence, kinds, state in zip(SEQUENCES, types, ours, strict=True):
        torch.testing.assert_close(
            state, states_of(theirs, sequence, token_type_ids=kinds[None]), atol=1e-4, rtol=0
        )


def as_pretrained_bert(tensors):
    """With a prefix, TensorFlow's names of layer norms, and what only the pretraining used."""
    tensors = {"bert." + name: tensor for name, tensor in tensors.items()}
    tensors = {
        re.sub("LayerNorm.weight$", "LayerNorm.gamma", name): tensor
        for name, tensor in tensors.items()
    }
    tensors = {
        re.sub("LayerNorm.bias$", "LayerNorm.beta", name): tensor
        for name, tensor in tensors.items()
    }
    return tensors | {
        "bert.embeddings.position_ids": torch.arange(80)[None],
        "cls.predictions.bias": torch.zeros(VOCAB_SIZE),
    }


def as_newer(names):
    """Renames by patterns, and unpacks queries, keys and values."""

    def change(tensors):
        out = {}
        for name, tensor in tensors.items():
            for pattern, replacement in names.items():
                name = re.sub(pattern, replacement, name)
            if "QKV" in name:
                out |= {
                    name.replace("QKV", part): piece
                    for part, piece in zip("qkv", tensor.chunk(3), strict=True)
                }
            else:
                out[name] = tensor
        return out

    return change


NOMIC = {
    r"^encoder\.layers\.": "layers.",
    r"^emb_ln\.": "embeddings.LayerNorm.",
    r"attn\.Wqkv": "self_attn.QKV_proj",
    r"\.attn\.out_proj": ".self_attn.o_proj",
    "fc11": "up_proj",
    "fc12": "gate_proj",
    "fc2": "down_proj",
    "norm1": "post_attention_layernorm",
    "norm2": "post_mlp_layernorm",
}


@pytest.mark.parametrize(
    ("family", "change", "config_changes"),
    [
        ("Bert", as_pretrained_bert, {"position_embedding_type": "absolute"}),
        ("NomicBert", as_newer(NOMIC), {}),
        (
            "MPNet",
            lambda tensors: {"mpnet." + name: tensor for name, tensor in tensors.items()},
            {},
        ),
        (
            "ModernBert",
            lambda tensors: (
                {"model." + name: tensor for name, tensor in tensors.items()}
                | {"head.dense.weight": torch.zeros(48, 48)}
            ),
            {
                "layer_types": None,
                "rope_parameters": None,
                "global_attn_every_n_layers": 3,
                "global_rope_theta": 160000.0,
                "local_rope_theta": 10000.0,
            },
        ),
    ],
)
def test_names_of_other_checkpoints(tmp_path, family, change, config_changes):
    theirs = make_checkpoint(f"{family}Model", first_variant(family), tmp_path)
    edited(tmp_path, change, **config_changes)
    assert_same_states([load(our_class(f"{family}Model"), tmp_path)], theirs)


@pytest.mark.parametrize(
    ("family", "config_changes", "error", "message"),
    [
        (
            "Bert",
            {"position_embedding_type": "relative_key"},
            UnsupportedError,
            "'position_embedding_type' is 'relative_key'",
        ),
        ("Bert", {"is_decoder": True}, UnsupportedError, "'is_decoder' makes"),
        (
            "Roberta",
            {"max_position_embeddings": 65},
            ConfigError,
            "max_model_len is 64, but the checkpoint has 63 positions",
        ),
        ("DebertaV2", {"conv_kernel_size": 4}, UnsupportedError, "'conv_kernel_size' is 4"),
        ("DebertaV2", {"pos_att_type": "p2p|c2p"}, UnsupportedError, "'pos_att_type' has 'p2p'"),
        (
            "ModernBert",
            {"layer_types": ["chunked"] * 5},
            CheckpointError,
            "for layer 0, not 'chunked'",
        ),
    ],
)
def test_what_a_family_does_not_do_is_refused(tmp_path, family, config_changes, error, message):
    make_checkpoint(f"{family}Model", first_variant(family), tmp_path)
    with pytest.raises(error, match=message):
        load(our_class(f"{family}Model"), edited(tmp_path, **config_changes))


def test_missing_weights_are_named(tmp_path):
    make_checkpoint("BertModel", BERT_LIKE, tmp_path)
    edited(
        tmp_path,
        lambda tensors: {
            name: tensor for name, tensor in tensors.items() if "layer.1.output.dense" not in name
        },
    )
    with pytest.raises(
        CheckpointError,
        match=re.escape(
            "2 missing: encoder.layer.1.output.dense.bias, encoder.layer.1.output.dense.weight"
        ),
    ):
        load(our_class("BertModel"), tmp_path)


def test_every_architecture_is_registered_and_can_be_loaded():
    models = ModelRegistry(owner=PluginInfo("encoder"))
    toolkit_lm_encoder.toolkit_register_models(models)
    assert len(models.keys()) == 62
    for entry in models.entries():
        assert entry.runner == "pooling"
        assert issubclass(models.load(entry.key), Model)


@pytest.mark.parametrize("kind", ["Model", "ForSequenceClassification", "ForTokenClassification"])
@pytest.mark.parametrize("family", list(VARIANTS))
def test_every_model_has_a_pooler(tmp_path, family, kind):
    make_checkpoint(f"{family}{kind}", first_variant(family), tmp_path)
    pooler = load(our_class(f"{family}{kind}"), tmp_path).pooler
    assert isinstance(pooler, Pooler)
    tasks = {
        "Model": {"embed", "token_embed"},
        "ForSequenceClassification": {"classify", "token_classify"},
        "ForTokenClassification": {"token_classify"},
    }
    assert pooler.supported_tasks() == tasks[kind]


def test_entry_module_imports_no_torch():
    code = "import sys, toolkit_lm_encoder; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parent, check=False
        ).returncode
        == 0
    )
