"""Language models as classifiers and rerankers, against transformers."""

import json
import re

import pytest
import torch
import transformers
from adapter_harness import IDS, SMALL, config_of, load, pooled, save_tokenizer
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from toolkit_lm.errors import CheckpointError, ConfigError, RequestError, UnsupportedError
from toolkit_lm.plugin import Plugins
from toolkit_lm_decoder.gpt2 import GPT2LMHeadModel
from toolkit_lm_decoder.llama import LlamaForCausalLM
from toolkit_lm_decoder.qwen2 import Qwen2ForCausalLM
from toolkit_lm_decoder.qwen3 import Qwen3ForCausalLM
from toolkit_lm_devkit import save_random
from toolkit_lm_pooling_adapters.classification import as_seq_cls_model
from toolkit_lm_pooling_adapters.origin import RERANKERS, classifier_origin
from toolkit_lm_pooling_adapters.registry import ScoreTemplateRegistry
from toolkit_lm_transformers.model import TransformersForCausalLM


def make(architecture, **more):
    config_class = getattr(transformers, architecture).config_class
    return getattr(transformers, architecture)(config_class(**{**SMALL, **more}))


def logits_of(folder, auto_class):
    with torch.inference_mode():
        return auto_class.from_pretrained(folder)(IDS[None]).logits[0]


TRAINED = {
    "llama": ("LlamaForSequenceClassification", LlamaForCausalLM, {}),
    "qwen3": ("Qwen3ForSequenceClassification", Qwen3ForCausalLM, {"tie_word_embeddings": True}),
    "gpt2": (
        "GPT2ForSequenceClassification",
        GPT2LMHeadModel,
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    ),
}


@pytest.mark.parametrize("family", TRAINED)
def test_a_trained_classifier(family, tmp_path):
    architecture, model_class, more = TRAINED[family]
    folder = save_random(tmp_path, make(architecture, num_labels=3, **more))
    expected = logits_of(folder, transformers.AutoModelForSequenceClassification)
    model = load(as_seq_cls_model, model_class, folder)
    torch.testing.assert_close(pooled(model, task="classify", use_activation=False), expected)
    torch.testing.assert_close(pooled(model, task="classify"), expected.softmax(0))
    by_token = pooled(model, task="token_classify", use_activation=False)
    assert by_token.shape == (len(IDS), 3)
    torch.testing.assert_close(by_token[-1], expected)
    with pytest.raises(RequestError, match="Unsupported task: 'score'"):
        pooled(model, task="score")


def test_a_trained_classifier_with_a_bias_of_one_label(tmp_path):
    folder = save_random(tmp_path, make("LlamaForSequenceClassification", num_labels=1))
    expected = logits_of(folder, transformers.AutoModelForSequenceClassification)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "score.bias": torch.tensor([0.75])}, folder / "model.safetensors")
    model = load(as_seq_cls_model, LlamaForCausalLM, folder)
    torch.testing.assert_close(pooled(model, task="score"), torch.sigmoid(expected + 0.75))


def test_a_trained_classifier_of_tokens_is_of_tokens_only(tmp_path):
    theirs = transformers.LlamaForTokenClassification(
        transformers.LlamaConfig(**SMALL, num_labels=3)
    )
    folder = save_random(tmp_path, theirs)
    model = load(as_seq_cls_model, LlamaForCausalLM, folder)
    assert type(model).__name__ == "LlamaForCausalLMForTokenClassification"
    assert model.pooler.supported_tasks() == {"token_classify"}
    expected = logits_of(folder, transformers.AutoModelForTokenClassification)
    torch.testing.assert_close(pooled(model, task="token_classify"), expected.softmax(-1))
    with pytest.raises(ConfigError, match="this model scores tokens"):
        load(as_seq_cls_model, LlamaForCausalLM, folder, pooling_type="LAST")


@pytest.mark.parametrize(("architecture", "model_class", "words"), [
    ("Qwen3ForCausalLM", Qwen3ForCausalLM, {"yes": 40, "no": 17}),
    ("Qwen2ForCausalLM", Qwen2ForCausalLM, {"1": 40, "0": 17}),
])  # fmt: skip
@pytest.mark.parametrize("tied", [False, True])
def test_a_known_reranker_of_two_words(architecture, model_class, words, tied, tmp_path):
    folder = save_random(tmp_path, make(architecture, tie_word_embeddings=tied))
    save_tokenizer(folder, **words)
    expected = logits_of(folder, transformers.AutoModelForCausalLM)
    model = load(as_seq_cls_model, model_class, folder)
    torch.testing.assert_close(pooled(model, task="score"), expected[-1, [17, 40]].softmax(0)[1:])
    torch.testing.assert_close(
        pooled(model, task="token_classify"), expected[:, [17, 40]].softmax(1)[:, 1:]
    )


def test_a_known_reranker_of_one_word_by_the_fallback(tmp_path):
    folder = save_random(tmp_path, make("GemmaForCausalLM"))
    save_tokenizer(folder, Yes=40)
    expected = logits_of(folder, transformers.AutoModelForCausalLM)[-1, [40]]
    model = load(as_seq_cls_model, TransformersForCausalLM, folder)
    torch.testing.assert_close(pooled(model, task="score", use_activation=False), expected)
    torch.testing.assert_close(pooled(model, task="score"), torch.sigmoid(expected))


ASSUMED = {
    "Qwen3ForCausalLM": (
        "Qwen3-Reranker.*classifier_method='from_2_way_softmax' classifier_tokens=.'no', 'yes'. "
        "score_template='qwen3-reranker"
    ),
    "Qwen2ForCausalLM": (
        "mxbai-rerank-v2.*classifier_method='from_2_way_softmax' classifier_tokens=.'0', '1'. "
        "score_template='mxbai-rerank-v2"
    ),
    "GemmaForCausalLM": (
        "bge-reranker-v2-gemma.*classifier_method='no_post_processing' classifier_tokens=.'Yes'. "
        "score_template='bge-"
    ),
}


def test_stored_padding_and_truncation_are_not_about_words(tmp_path):
    folder = save_random(tmp_path, make("Qwen3ForCausalLM"))
    save_tokenizer(folder, yes=40, no=17)
    config = config_of(folder, score_template="qwen3-reranker")
    plain = classifier_origin(config)
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.enable_padding(length=128)
    tokenizer.enable_truncation(64)
    tokenizer.save(path)
    assert classifier_origin(config) == plain
    tokenizer.enable_truncation(1)
    tokenizer.save(path)
    with pytest.raises(CheckpointError, match=r"'yes no' is 2 tokens"):
        classifier_origin(
            config_of(folder, classifier_method="no_post_processing", classifier_tokens=["yes no"])
        )


def warnings_of(caplog, folder, rank=0, **options):
    caplog.clear()
    as_seq_cls_model(TransformersForCausalLM, config_of(folder, **options).with_rank(rank))
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("architecture", ASSUMED)
def test_what_is_taken_for_a_reranker_is_said_to_be(architecture, tmp_path, caplog):
    folder = save_random(tmp_path, make(architecture))
    save_tokenizer(folder, yes=40, no=17, Yes=41, **{"0": 18, "1": 42})
    (warning,) = warnings_of(caplog, folder)
    assert re.search(
        f"this {architecture} has no trained classifier. It is run as a reranker like "
        f"{ASSUMED[architecture]}",
        warning,
    )
    assert "\n" not in warning
    # The assumed template is the registered one; naming it gives the same.
    known = RERANKERS[architecture]
    named = {"classifier_method": known.method, "classifier_tokens": list(known.words)}
    assert classifier_origin(config_of(folder, **named)) == classifier_origin(config_of(folder))
    (template,) = (
        e.key
        for e in Plugins.load().brought_registry(ScoreTemplateRegistry).entries()
        if architecture in e.architectures
    )
    assert known.template == template
    # Only one of several workers warns. The words alone do not say what is done with them.
    assert warnings_of(caplog, folder, rank=1, pipeline_parallel_size=2) == []
    (warning,) = warnings_of(caplog, folder, classifier_tokens=["no", "yes"][-len(known.words) :])
    assert f"classifier_tokens={['yes'] if len(known.words) == 1 else ['no', 'yes']} " in warning


def test_no_warning_where_it_is_said(tmp_path, caplog):
    folder = save_random(tmp_path / "causal", make("Qwen3ForCausalLM"))
    save_tokenizer(folder, yes=40, no=17)
    assert warnings_of(caplog, folder)
    assert warnings_of(caplog, folder, classifier_method="from_2_way_softmax") == []
    assert warnings_of(caplog, folder, score_template="qwen3-reranker") == []
    write_logit_score(folder)
    assert warnings_of(caplog, folder) == []
    trained = save_random(tmp_path / "trained", make("Qwen3ForSequenceClassification"))
    assert warnings_of(caplog, trained) == []


@pytest.mark.parametrize("prefixed", [True, False])
def test_any_language_model_by_options(prefixed, tmp_path):
    folder = save_random(tmp_path, make("LlamaForCausalLM", tie_word_embeddings=True))
    save_tokenizer(folder, good=40, bad=17, fair=5)
    expected = logits_of(folder, transformers.AutoModelForCausalLM)[-1]
    if not prefixed:
        weights = load_file(folder / "model.safetensors")
        save_file(
            {name.removeprefix("model."): tensor for name, tensor in weights.items()},
            folder / "model.safetensors",
        )
    options = {"classifier_method": "from_2_way_softmax", "classifier_tokens": ["bad", "good"]}
    model = load(as_seq_cls_model, LlamaForCausalLM, folder, **options)
    torch.testing.assert_close(pooled(model, task="score"), expected[[17, 40]].softmax(0)[1:])
    options = {
        "classifier_method": "no_post_processing",
        "classifier_tokens": ["bad", "fair", "good"],
    }
    model = load(as_seq_cls_model, LlamaForCausalLM, folder, **options)
    torch.testing.assert_close(pooled(model, task="classify"), expected[[17, 5, 40]].softmax(0))


def write_logit_score(folder):
    """sentence-transformers' files of a reranker that says which words it takes."""
    home = "sentence_transformers.cross_encoder.modules"
    modules = [
        ("", "sentence_transformers.base.modules.transformer.Transformer"),
        ("1_LogitScore", f"{home}.logit_score.LogitScore"),
    ]
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": i, "name": str(i), "path": path, "type": kind}
                for i, (path, kind) in enumerate(modules)
            ]
        )
    )
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 64, "do_lower_case": False})
    )
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text(
        json.dumps({"true_token_id": 40, "false_token_id": 17})
    )


def test_a_reranker_of_sentence_transformers(tmp_path):
    folder = save_random(tmp_path, make("LlamaForCausalLM"))
    write_logit_score(folder)
    expected = logits_of(folder, transformers.AutoModelForCausalLM)[-1]
    model = load(as_seq_cls_model, LlamaForCausalLM, folder)
    torch.testing.assert_close(pooled(model, task="score"), expected[[17, 40]].softmax(0)[1:])


def test_the_class(tmp_path):
    config = config_of(save_random(tmp_path, make("LlamaForSequenceClassification")))
    converted = as_seq_cls_model(LlamaForCausalLM, config)
    assert converted.__name__ == "LlamaForCausalLMForSequenceClassification"
    assert as_seq_cls_model(converted, config) is converted


def test_a_tokenizer_that_panics_is_refused(tmp_path):
    """The package tokenizers panics on a regular expression that takes too many steps: no `except
    Exception` sees that."""
    folder = save_random(tmp_path, make("LlamaForCausalLM"))
    word = "x" * 40
    tokenizer = Tokenizer(models.WordLevel({"w1": 1, word: 2}, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    options = {"classifier_method": "no_post_processing", "classifier_tokens": [word]}
    refuse(
        folder,
        CheckpointError,
        r"the token 'x+' .* cannot be looked up in .*tokenizer\.json.*retry-limit",
        **options,
    )


def refuse(folder, error, match, model_class=LlamaForCausalLM, **options):
    """Asserts that an adapter refuses a checkpoint before its weights are read."""
    with pytest.raises(error, match=match):
        as_seq_cls_model(model_class, config_of(folder, **options))


def test_refusals(tmp_path):
    folder = save_random(tmp_path / "causal", make("LlamaForCausalLM"))
    two = {"classifier_method": "from_2_way_softmax"}
    refuse(
        folder,
        UnsupportedError,
        "LlamaForCausalLM is not known as a reranker .*Qwen3ForCausalLM.* Use classifier_method=",
    )
    refuse(folder, ConfigError, "'from_2_way_softmax' needs classifier_tokens", **two)
    refuse(
        folder,
        ConfigError,
        "takes two: FALSE,TRUE, but classifier_tokens has 1",
        **two,
        classifier_tokens=["yes"],
    )
    refuse(
        folder,
        CheckpointError,
        "the token 'no' .* cannot be looked up in .*tokenizer.json",
        **two,
        classifier_tokens=["no", "yes"],
    )
    save_tokenizer(folder, yes=40)
    refuse(
        folder,
        CheckpointError,
        "'yes yes' is 2 tokens",
        **two,
        classifier_tokens=["yes", "yes yes"],
    )
    trained = save_random(tmp_path / "trained", make("LlamaForSequenceClassification"))
    refuse(
        trained,
        ConfigError,
        "classifier_method 'from_2_way_softmax' .* has a trained one",
        **two,
        classifier_tokens=["no", "yes"],
    )
    refuse(
        trained,
        ConfigError,
        r"classifier_tokens \['yes'\] is for .* has a trained one",
        classifier_tokens=["yes"],
    )
    refuse(
        folder,
        ConfigError,
        "classifier_tokens yes, yes name the same token twice",
        **two,
        classifier_tokens=["yes", "yes"],
    )
    capped = json.loads((folder / "config.json").read_text()) | {"final_logit_softcapping": 30.0}
    (folder / "config.json").write_text(json.dumps(capped))
    refuse(
        folder,
        UnsupportedError,
        "'final_logit_softcapping' changes logits",
        **two,
        classifier_tokens=["no", "yes"],
    )


def test_weights_that_do_not_fit(tmp_path):
    folder = save_random(tmp_path, make("LlamaForSequenceClassification", num_labels=3))
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "score.weight": torch.zeros(4, 32)}, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"'weight' is float32 \[4, 32\], but config.json asks for floats \[3, 32\]",
    ):
        load(as_seq_cls_model, LlamaForCausalLM, folder)


def test_dummy_weights(tmp_path):
    folder = save_random(tmp_path, make("Qwen3ForCausalLM"))
    assert pooled(
        load(as_seq_cls_model, Qwen3ForCausalLM, folder, load_format="dummy"), task="score"
    ).shape == (1,)


@pytest.mark.parametrize("tied", [False, True])
def test_the_stages_of_a_pipeline(tied, tmp_path):
    folder = save_random(tmp_path, make("Qwen3ForCausalLM", tie_word_embeddings=tied))
    save_tokenizer(folder, yes=40, no=17)
    expected = pooled(load(as_seq_cls_model, Qwen3ForCausalLM, folder), task="score")
    stages = [
        load(as_seq_cls_model, Qwen3ForCausalLM, folder, rank=rank, pipeline_parallel_size=2)
        for rank in range(2)
    ]
    torch.testing.assert_close(pooled(*stages, task="score"), expected)
