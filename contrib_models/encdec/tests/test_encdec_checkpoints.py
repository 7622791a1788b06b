"""Shards, other backends and dtypes, the files of other releases, and what is refused."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import toolkit_lm_encdec
import torch
import transformers
from encdec_families import (
    VARIANTS,
    VOCAB_SIZE,
    make_checkpoint,
    make_model,
    our_class,
    reference_logits,
)
from encdec_harness import Driver, load, random_sequences, steps
from safetensors.torch import load_file, save_file
from toolkit_lm.errors import CheckpointError, ConfigError
from toolkit_lm.plugin import ModelRegistry, PluginInfo
from toolkit_lm_cpu.backend import CpuBackend
from toolkit_lm_devkit import assert_bf16_error, run_ranks
from toolkit_lm_encdec.positions import SinusoidalPositions
from toolkit_lm_encdec.relative_bias import buckets_of
from transformers.models.t5.modeling_t5 import T5Attention

BART = "BartForConditionalGeneration"
T5 = "T5ForConditionalGeneration"
PEGASUS = "PegasusForConditionalGeneration"


def fields_of(architecture, variant=None):
    variants = VARIANTS[architecture]
    return variants[variant] if variant else next(iter(variants.values()))


def computed(model, **options):
    """Logits of all sequences, one after the other."""
    sequences = random_sequences()
    Driver(model, **options).run(*steps(sequences))
    return torch.cat([torch.cat(sequence.logits) for sequence in sequences])


def expected(theirs):
    return torch.cat(
        [
            reference_logits(theirs, sequence.encoder_ids, sequence.token_ids)
            for sequence in random_sequences()
        ]
    )


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, expected(theirs), atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", list(VARIANTS))
def test_two_ranks(tmp_path, architecture):
    theirs = make_checkpoint(architecture, fields_of(architecture), tmp_path)

    def work(rank):
        return computed(load(our_class(architecture), tmp_path, rank=rank, tensor_parallel_size=2))

    for ours in run_ranks(work):
        assert_same(ours, theirs)


@pytest.mark.parametrize("side", ["model", "encoder"])
@pytest.mark.parametrize("architecture", [BART, PEGASUS])
def test_sequences_that_are_longer_than_the_table_of_positions(tmp_path, architecture, side):
    make_checkpoint(architecture, fields_of(architecture), tmp_path)
    with pytest.raises(
        ConfigError,
        match=f"max_{side}_len is 81, but the checkpoint has 80 positions: give --max-{side}-len "
        "80 or less",
    ):
        load(our_class(architecture), tmp_path, **{f"max_{side}_len": 81})


def test_heads_that_ranks_cannot_share(tmp_path):
    make_checkpoint(BART, fields_of(BART), tmp_path)
    with pytest.raises(ConfigError, match="attention heads of model"):
        load(our_class(BART), tmp_path, tensor_parallel_size=4)


@pytest.mark.parametrize("architecture", list(VARIANTS))
def test_the_backend_of_the_cpu(tmp_path, architecture):
    theirs = make_checkpoint(architecture, fields_of(architecture), tmp_path)
    assert_same(computed(load(our_class(architecture), tmp_path), backend=CpuBackend), theirs)


@pytest.mark.parametrize("architecture", list(VARIANTS))
def test_bfloat16_error_is_that_of_transformers(tmp_path, architecture):
    """Both are compared with transformers in float32, on the weights that bfloat16 leaves."""
    half = make_model(architecture, fields_of(architecture)).to(torch.bfloat16)
    half.save_pretrained(tmp_path)
    ours = computed(load(our_class(architecture), tmp_path, dtype="bfloat16"))
    assert_bf16_error([ours], [expected(half)], [expected(copy.deepcopy(half).float())])


def edited(folder, change, **config_changes):
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


def unchanged(tensors):
    return tensors


def as_bart_base(tensors):
    """Tensors in the published form of bart-base, whose embedding has all of its names."""
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    shared = dict.fromkeys(
        ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), tensors["shared.weight"]
    )
    return tensors | shared | {"encoder.version": torch.ones(1), "decoder.version": torch.ones(1)}


def with_one_name_of_the_embedding(name):
    def change(tensors):
        return {
            name if key == "model.shared.weight" else key: tensor for key, tensor in tensors.items()
        }

    return change


def as_first_t5(tensors):
    bias = torch.zeros(12, 4)
    return tensors | {
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": bias
    }


@pytest.mark.parametrize(
    ("architecture", "change", "config_changes"),
    [
        (BART, as_bart_base, {"tie_word_embeddings": None}),
        (BART, with_one_name_of_the_embedding("lm_head.weight"), {}),
        (BART, with_one_name_of_the_embedding("model.decoder.embed_tokens.weight"), {}),
        (
            T5,
            as_first_t5,
            {"scale_decoder_outputs": None, "tie_word_embeddings": None, "num_decoder_layers": 3},
        ),
    ],
)
def test_files_of_other_releases(tmp_path, architecture, change, config_changes):
    theirs = make_checkpoint(architecture, fields_of(architecture), tmp_path)
    edited(tmp_path, change, **config_changes)
    assert_same(computed(load(our_class(architecture), tmp_path)), theirs)


def test_without_a_bias_of_logits(tmp_path):
    theirs = make_checkpoint(BART, fields_of(BART), tmp_path)
    theirs.final_logits_bias.zero_()
    edited(
        tmp_path,
        lambda tensors: {
            name: tensor for name, tensor in tensors.items() if name != "final_logits_bias"
        },
    )
    assert_same(computed(load(our_class(BART), tmp_path)), theirs)


def test_embeddings_that_are_not_tied_and_not_there(tmp_path):
    """Releases before 5 shared the embedding of both sides whatever the head had, and saved it
    once."""
    theirs = make_checkpoint(BART, fields_of(BART, "unscaled, apart"), tmp_path)
    for side in (theirs.model.encoder, theirs.model.decoder):
        side.embed_tokens.weight.data.copy_(theirs.model.shared.weight)
    edited(
        tmp_path,
        lambda tensors: {
            name: tensor for name, tensor in tensors.items() if "embed_tokens" not in name
        },
    )
    assert_same(computed(load(our_class(BART), tmp_path)), theirs)


@pytest.mark.parametrize("in_file", [True, False])
def test_positions_of_a_file_count(tmp_path, in_file):
    theirs = make_checkpoint(PEGASUS, fields_of(PEGASUS), tmp_path)
    table = theirs.model.encoder.embed_positions.weight.data

    def change(tensors):
        tensors = {
            name: tensor for name, tensor in tensors.items() if "embed_positions" not in name
        }
        return tensors | ({"model.encoder.embed_positions.weight": table} if in_file else {})

    if in_file:
        table.mul_(-0.5)
    edited(tmp_path, change)
    assert_same(computed(load(our_class(PEGASUS), tmp_path)), theirs)


@pytest.mark.parametrize("architecture", [T5, "MT5ForConditionalGeneration"])
@pytest.mark.parametrize("resaved", [False, True])
def test_a_head_of_its_own(tmp_path, architecture, resaved):
    """T5 1.1, FLAN-T5 and mT5 are read as published, and as transformers 5 saves them again: with
    another config.json."""
    fields = VARIANTS[T5]["1.1"]
    make_checkpoint(architecture, fields, tmp_path)
    head = (
        torch.randn(VOCAB_SIZE, fields["d_model"], generator=torch.Generator().manual_seed(5)) * 0.2
    )
    edited(
        tmp_path,
        lambda tensors: tensors | {"lm_head.weight": head},
        tie_word_embeddings=False,
        scale_decoder_outputs=None,
    )
    theirs = getattr(transformers, architecture).from_pretrained(tmp_path).eval()
    assert torch.equal(theirs.lm_head.weight, head)
    if resaved:
        theirs.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"]
    assert_same(computed(load(our_class(architecture), tmp_path)), theirs)


@pytest.mark.parametrize(
    ("architecture", "config_changes", "message"),
    [
        (BART, {"decoder_layers": None}, "no 'decoder_layers'"),
        (T5, {"feed_forward_proj": "gated-gelu-x"}, "'feed_forward_proj' must be"),
        (
            T5,
            {"relative_attention_max_distance": 6},
            "'relative_attention_max_distance' more than half of it",
        ),
        (
            T5,
            {"relative_attention_num_buckets": 3},
            "'relative_attention_num_buckets' must be 4 or more",
        ),
    ],
)
def test_what_a_family_does_not_do_is_refused(tmp_path, architecture, config_changes, message):
    make_checkpoint(architecture, fields_of(architecture), tmp_path)
    edited(tmp_path, unchanged, **config_changes)
    with pytest.raises(CheckpointError, match=message):
        load(our_class(architecture), tmp_path)


@pytest.mark.parametrize(
    ("architecture", "left_out", "named"),
    [
        (
            BART,
            "encoder_attn.k_proj.weight",
            "3 missing: model.decoder.layers.0.encoder_attn.k_proj.weight",
        ),
        (T5, "DenseReluDense.wi.weight", "5 missing: decoder.block.0.mlp.wi.weight"),
    ],
)
def test_missing_weights_are_named(tmp_path, architecture, left_out, named):
    make_checkpoint(architecture, fields_of(architecture), tmp_path)
    edited(
        tmp_path,
        lambda tensors: {
            name: tensor for name, tensor in tensors.items() if not name.endswith(left_out)
        },
    )
    with pytest.raises(CheckpointError, match=re.escape(named)):
        load(our_class(architecture), tmp_path)


def test_sines_are_those_of_transformers():
    theirs = transformers.models.marian.modeling_marian.MarianSinusoidalPositionalEmbedding(
        1024, 96
    )
    assert torch.equal(
        SinusoidalPositions(1024, 96, dtype=torch.float32).weight, theirs.create_weight()
    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sizes", [(32, 128), (12, 20), (8, 1000)])
def test_buckets_are_those_of_transformers(sizes, is_causal):
    offsets = torch.arange(-2000, 2001)
    theirs = T5Attention._relative_position_bucket(offsets, not is_causal, *sizes)
    assert torch.equal(buckets_of(offsets, *sizes, is_causal=is_causal), theirs)


def test_every_architecture_is_registered_and_can_be_loaded():
    models = ModelRegistry(owner=PluginInfo("encdec"))
    toolkit_lm_encdec.toolkit_register_models(models)
    assert len(models.keys()) == 11
    for entry in models.entries():
        encodes_only = entry.encoder_decoder is None
        assert encodes_only == entry.key.endswith("EncoderModel")
        is_t5 = entry.target.startswith("toolkit_lm_encdec.t5")
        assert (entry.runner, entry.bounded) == (
            "pooling" if encodes_only else "generate",
            not is_t5,
        )
        assert ("encoder" in models.load(entry.key).parts) != encodes_only


@pytest.mark.parametrize("module", ["toolkit_lm_encdec", "toolkit_lm_encdec.rules"])
def test_what_the_frontend_imports_needs_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parent, check=False
        ).returncode
        == 0
    )
