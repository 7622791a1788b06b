"""From tokens to what a request gets: embeddings, late interaction, classes."""

import json

import pytest
import torch
from encoder_families import BERT_LIKE, MODERN, load, make_checkpoint, our_class, random_sequences
from safetensors.torch import load_file, save_file
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm_devkit import pooled
from toolkit_lm_encoder.colbert import dimensions
from torch.nn.functional import normalize

SEQUENCES = random_sequences()


def reference(theirs, sequence):
    with torch.inference_mode():
        return theirs(sequence[None])


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_embeddings_are_means_of_length_1(tmp_path):
    theirs = make_checkpoint("BertModel", BERT_LIKE, tmp_path)
    for ours, sequence in zip(
        pooled([load(our_class("BertModel"), tmp_path)], SEQUENCES, task="embed"),
        SEQUENCES,
        strict=True,
    ):
        assert_same(
            ours, normalize(reference(theirs, sequence).last_hidden_state[0].mean(0), dim=-1)
        )


def name_colbert(folder, **more):
    """Makes config.json that of the authors' own library."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"architectures": ["HF_ColBERT"]} | more)
    )


@pytest.mark.parametrize("metadata", [{"dim": 20}, None], ids=["artifact.metadata", "config.json"])
def test_colbert_checkpoints(tmp_path, metadata):
    """Checkpoints in the form of the authors' own library."""
    theirs = make_checkpoint("BertModel", BERT_LIKE, tmp_path)
    weight = torch.randn(20, 48)
    tensors = {
        f"bert.{name}": tensor.clone()
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(tensors | {"linear.weight": weight}, tmp_path / "model.safetensors")
    if metadata is not None:
        (tmp_path / "artifact.metadata").write_text(json.dumps(metadata))
    name_colbert(tmp_path, **({} if metadata else {"dim": 20}))
    model = load(our_class("HF_ColBERT"), tmp_path)
    assert model.pooler.supported_tasks() == {"token_embed"}
    for ours, sequence in zip(
        pooled([model], SEQUENCES, task="token_embed"), SEQUENCES, strict=True
    ):
        assert_same(
            ours, normalize(reference(theirs, sequence).last_hidden_state[0] @ weight.T, dim=-1)
        )


def test_colbert_whose_size_nobody_reads():
    with pytest.raises(
        CheckpointError, match=r"config\.json has no 'dim', and no plugin reads artifact\.metadata"
    ):
        dimensions(VllmConfig.default({"architectures": ["HF_ColBERT"]}))


@pytest.mark.parametrize(
    ("written", "culprit"),
    [("{", "cannot be read"), ('{"dim": "20"}', "'dim' must be an integer"), ("[]", "object")],
)
def test_colbert_metadata_that_is_not_understood(tmp_path, written, culprit):
    make_checkpoint("BertModel", BERT_LIKE, tmp_path)
    (tmp_path / "artifact.metadata").write_text(written)
    name_colbert(tmp_path)
    with pytest.raises(CheckpointError, match=rf"artifact\.metadata.*{culprit}"):
        load(our_class("HF_ColBERT"), tmp_path)


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [("BertModel", BERT_LIKE), ("ModernBertModel", {**MODERN, "local_attention": 8})],
)
def test_late_interaction_checkpoints_of_pylate(tmp_path, architecture, fields):
    """modules.json has a Dense, and nothing that pools."""
    theirs = make_checkpoint(architecture, fields, tmp_path)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "config_sentence_transformers.json").write_text(
        json.dumps({"query_prefix": "[Q] ", "document_prefix": "[D] "})
    )
    dense = tmp_path / "1_Dense"
    dense.mkdir()
    identity = "torch.nn.modules.linear.Identity"
    (dense / "config.json").write_text(
        json.dumps(
            {"in_features": 48, "out_features": 20, "bias": False, "activation_function": identity}
        )
    )
    weight = torch.randn(20, 48)
    save_file({"linear.weight": weight}, dense / "model.safetensors")
    model = load(our_class(architecture), tmp_path)
    assert model.pooler.supported_tasks() == {"token_embed"}
    for ours, sequence in zip(
        pooled([model], SEQUENCES, task="token_embed"), SEQUENCES, strict=True
    ):
        assert_same(
            ours, normalize(reference(theirs, sequence).last_hidden_state[0] @ weight.T, dim=-1)
        )


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_classes(tmp_path, pooling):
    theirs = make_checkpoint(
        "ModernBertForSequenceClassification", {**MODERN, "classifier_pooling": pooling}, tmp_path
    )
    model = load(our_class("ModernBertForSequenceClassification"), tmp_path)
    for ours, sequence in zip(pooled([model], SEQUENCES, task="classify"), SEQUENCES, strict=True):
        assert_same(ours, reference(theirs, sequence).logits[0].softmax(-1))


def test_scores_of_a_cross_encoder(tmp_path):
    fields = {**BERT_LIKE, "num_labels": 1}
    theirs = make_checkpoint("BertForSequenceClassification", fields, tmp_path)
    model = load(our_class("BertForSequenceClassification"), tmp_path)
    for ours, sequence in zip(pooled([model], SEQUENCES, task="score"), SEQUENCES, strict=True):
        assert_same(ours, reference(theirs, sequence).logits[0].sigmoid())


def test_classes_of_tokens(tmp_path):
    theirs = make_checkpoint(
        "RobertaForTokenClassification", {**BERT_LIKE, "pad_token_id": 1}, tmp_path
    )
    model = load(our_class("RobertaForTokenClassification"), tmp_path)
    for ours, sequence in zip(
        pooled([model], SEQUENCES, task="token_classify"), SEQUENCES, strict=True
    ):
        assert_same(ours, reference(theirs, sequence).logits[0].softmax(-1))
