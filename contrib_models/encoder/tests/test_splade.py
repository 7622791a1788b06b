"""SPLADE: weights of the vocabulary's tokens, of the logits of transformers' masked language
models."""

import json

import numpy as np
import pytest
import torch
import transformers
from encoder_families import (
    BERT_LIKE,
    ROBERTA_LIKE,
    VARIANTS,
    load,
    make_checkpoint,
    make_model,
    our_class,
    random_sequences,
)
from toolkit_lm import LLM
from toolkit_lm.errors import CheckpointError, ConfigError, UnsupportedError
from toolkit_lm_devkit import make_checkpoint as write_whole_checkpoint, pooled, randomize

SEQUENCES = random_sequences()
OLD = "sentence_transformers.sparse_encoder.models"
NEW = "sentence_transformers.sparse_encoder.modules"
TYPES = {
    "old": (f"{OLD}.MLMTransformer", f"{OLD}.SpladePooling"),
    "new": (
        "sentence_transformers.base.modules.transformer.Transformer",
        f"{NEW}.splade_pooling.SpladePooling",
    ),
    "between": (f"{NEW}.mlm_transformer.MLMTransformer", f"{NEW}.SpladePooling"),
}


def write_files(folder, types="old", **settings):
    """The files of sentence-transformers' SparseEncoder."""
    listed = zip(("", "1_SpladePooling"), TYPES[types], strict=True)
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": index, "name": str(index), "path": path, "type": kind}
                for index, (path, kind) in enumerate(listed)
            ]
        )
    )
    task = {"transformer_task": "fill-mask"} if types == "new" else {}
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 64, "do_lower_case": False, **task})
    )
    (folder / "1_SpladePooling").mkdir(exist_ok=True)
    (folder / "1_SpladePooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": None, **settings})
    )
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"model_type": "SparseEncoder"})
    )


def expected(model, sequence, strategy, activation):
    with torch.inference_mode():
        weights = model(sequence[None]).logits[0].relu().log1p()
    if activation == "log1p_relu":
        weights = weights.log1p()
    return weights.amax(0) if strategy == "max" else weights.sum(0)


@pytest.mark.parametrize(
    ("family", "types", "strategy", "activation"),
    [
        ("Bert", "old", "max", "relu"),
        ("XLMRoberta", "new", "sum", "relu"),
        ("DistilBert", "between", "max", "log1p_relu"),
    ],
)
def test_weights_are_those_of_transformers(tmp_path, family, types, strategy, activation):
    architecture = f"{family}ForMaskedLM"
    theirs = make_checkpoint(architecture, VARIANTS[family]["plain"], tmp_path)
    write_files(tmp_path, types, pooling_strategy=strategy, activation_function=activation)
    model = load(our_class(architecture), tmp_path)
    assert model.pooler.supported_tasks() == {"embed"}
    found = pooled([model], SEQUENCES, task="embed")
    for ours, sequence in zip(found, SEQUENCES, strict=True):
        wanted = expected(theirs, sequence, strategy, activation)
        assert wanted.count_nonzero() > 0
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-5)


def test_a_head_that_is_not_the_embedding(tmp_path):
    fields = {**BERT_LIKE, "tie_word_embeddings": False}
    theirs = make_checkpoint("BertForMaskedLM", fields, tmp_path)
    write_files(tmp_path, pooling_strategy="max")
    [ours] = pooled([load(our_class("BertForMaskedLM"), tmp_path)], SEQUENCES[:1], task="embed")
    wanted = expected(theirs, SEQUENCES[0], "max", "relu")
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-5)


def test_without_these_files_the_head_is_passed_over(tmp_path):
    make_checkpoint("RobertaForMaskedLM", ROBERTA_LIKE, tmp_path)
    theirs = transformers.RobertaModel.from_pretrained(tmp_path)
    model = load(our_class("RobertaForMaskedLM"), tmp_path)
    assert not list(model.mlm_head.parameters())
    [ours] = pooled([model], SEQUENCES[:1], task="embed")
    with torch.inference_mode():
        mean = theirs(SEQUENCES[0][None]).last_hidden_state[0].mean(0)
    torch.testing.assert_close(ours, mean / mean.norm(), atol=1e-4, rtol=0)


def test_a_class_without_the_head_is_refused(tmp_path):
    make_checkpoint("MPNetForMaskedLM", BERT_LIKE, tmp_path)
    write_files(tmp_path)
    with pytest.raises(UnsupportedError, match="SPLADE"):
        load(our_class("MPNetForMaskedLM"), tmp_path)


def test_options_that_do_not_apply(tmp_path):
    make_checkpoint("BertForMaskedLM", BERT_LIKE, tmp_path)
    write_files(tmp_path)
    with pytest.raises(ConfigError, match="pooling_type 'MEAN' does not apply"):
        load(our_class("BertForMaskedLM"), tmp_path, pooling_type="MEAN")
    with pytest.raises(UnsupportedError, match="pipeline_parallel_size=1"):
        load(our_class("BertForMaskedLM"), tmp_path, rank=1, pipeline_parallel_size=2)


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"pooling_strategy": "mean"}, None, "'pooling_strategy' is 'mean'"),
        ({"activation_function": "gelu"}, None, "'activation_function' is 'gelu'"),
        ({}, "sentence_transformers.models.Transformer", "whose task is 'fill-mask'"),
    ],
)
def test_files_that_are_not_understood(tmp_path, settings, kind, message):
    make_checkpoint("BertForMaskedLM", BERT_LIKE, tmp_path)
    write_files(tmp_path, **settings)
    if kind is not None:
        listing = json.loads((tmp_path / "modules.json").read_text())
        listing[0]["type"] = kind
        (tmp_path / "modules.json").write_text(json.dumps(listing))
    with pytest.raises(CheckpointError, match=message):
        load(our_class("BertForMaskedLM"), tmp_path)


def test_scores_are_dot_products(tmp_path):
    model = make_model("BertForMaskedLM", {**BERT_LIKE, "vocab_size": 270}).eval()
    randomize(model)
    write_whole_checkpoint(tmp_path, model)
    write_files(tmp_path)
    with LLM(str(tmp_path), device="cpu", dtype="float32") as llm:
        query, *documents = (
            output.outputs.data for output in llm.embed(["ab", "abc", "xyz"], use_tqdm=False)
        )
        scores = [out.outputs.score for out in llm.score("ab", ["abc", "xyz"], use_tqdm=False)]
    assert len(query) == 270
    np.testing.assert_allclose(scores, [query @ document for document in documents], rtol=1e-4)
