"""Encoder models through the whole engine, from texts on: as transformers' own model and tokenizer
have it."""

from __future__ import annotations

import json
import shutil
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from toolkit_lm import LLM, PoolingParams
from toolkit_lm.errors import ConfigError, ContextLengthError, RequestError
from toolkit_lm_devkit import randomize

SHAPE = {
    "vocab_size": 120,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "pad_token_id": 1,
}
BERT_LIKE = {**SHAPE, "pad_token_id": 0, "max_position_embeddings": 64}
SPECIAL = {"cls_token_id": 2, "bos_token_id": 2, "sep_token_id": 3, "eos_token_id": 3}
FIELDS = {
    "Bert": BERT_LIKE,
    "Roberta": {**SHAPE, "type_vocab_size": 1},
    "MPNet": SHAPE,
    "DistilBert": {**BERT_LIKE, "dim": 48, "hidden_dim": 80, "n_layers": 2, "n_heads": 4},
    "ModernBert": {**BERT_LIKE, **SPECIAL, "local_attention": 8, "num_hidden_layers": 4},
}
WORDS = [f"w{number}" for number in range(5, 120)]
TEXTS = [
    " ".join(WORDS[(7 * i + k) % 115] for i in range(length))
    for k, length in enumerate((5, 50, 1, 17, 50, 62))
]
QUERY = "w9 w10 w11"


def make_tokenizer(family: str) -> transformers.PreTrainedTokenizerFast:
    """One token a word. Pairs are [CLS] A [SEP] B [SEP] with types, or <s> A </s></s> B </s>
    without."""
    vocab = {
        name: i for i, name in enumerate(["[PAD]", "<pad>", "[CLS]", "[SEP]", "[UNK]", *WORDS])
    }
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pair = (
        "[CLS] $A [SEP] [SEP] $B [SEP]"
        if family in ("Roberta", "MPNet")
        else "[CLS] $A [SEP] $B:1 [SEP]:1"
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=pair, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        unk_token="[UNK]",
    )


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """A function (family, kind, **config fields) -> checkpoint: folder, model and tokenizer of
    transformers."""

    @cache
    def made(family, kind, **fields):
        cls = getattr(transformers, f"{family}{kind}")
        torch.manual_seed(0)
        model = cls(cls.config_class(**(FIELDS[family] | fields))).eval()
        randomize(model)
        folder = tmp_path_factory.mktemp(f"{family}{kind}")
        tokenizer = make_tokenizer(family)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return SimpleNamespace(
            folder=str(folder), model=model, tokenizer=tokenizer, types=family == "Bert"
        )

    return made


def reference(made, text, pair=None, **options):
    """transformers' output for one text or pair, not padded."""
    inputs = made.tokenizer(
        text, pair, return_tensors="pt", return_token_type_ids=made.types, **options
    )
    with torch.inference_mode():
        return made.model(
            **{
                name: inputs[name]
                for name in ("input_ids", "attention_mask", "token_type_ids")
                if name in inputs
            }
        )


def same(outputs, expected, atol=2e-5):
    for output, values in zip(outputs, expected, strict=True):
        assert output.error is None
        np.testing.assert_allclose(output.outputs.data, values, atol=atol)


def unit(vector):
    return torch.nn.functional.normalize(vector, dim=-1)


@pytest.mark.parametrize("family", FIELDS)
class TestFamilies:
    def test_embeddings(self, make, family):
        made = make(family, "Model")
        states = [reference(made, text).last_hidden_state[0] for text in TEXTS]
        with LLM(made.folder) as llm:
            cache = llm.engine.client.core.kv_cache
            assert (cache.pools, cache.groups) == ([], [])
            assert llm.engine.tasks == ("embed", "token_embed")
            assert llm.config.max_model_len == 64
            together = llm.encode(TEXTS, pooling_task="embed", use_tqdm=False)
            same(together, [unit(one.mean(0)) for one in states])
            same(
                [llm.encode(text, pooling_task="embed", use_tqdm=False)[0] for text in TEXTS],
                [output.outputs.data for output in together],
            )
            wishes = [PoolingParams(task=task) for task in ("embed", "token_embed")] * 3
            mixed = [
                unit(one) if wish.task == "token_embed" else unit(one.mean(0))
                for one, wish in zip(states, wishes, strict=True)
            ]
            same(llm.encode(TEXTS, wishes, use_tqdm=False), mixed)
            assert [output.prompt_token_ids for output in together] == [
                made.tokenizer(text)["input_ids"] for text in TEXTS
            ]

    @pytest.mark.parametrize("method", ["CLS", "MAX", "LAST"])
    def test_other_methods(self, make, family, method):
        made = make(family, "Model")
        pool = {
            "CLS": lambda one: one[0],
            "MAX": lambda one: one.amax(0),
            "LAST": lambda one: one[-1],
        }[method]
        expected = [pool(reference(made, text).last_hidden_state[0]) for text in TEXTS]
        with LLM(made.folder, pooling_type=method, normalize=False) as llm:
            same(llm.encode(TEXTS, pooling_task="embed", use_tqdm=False), expected)

    def test_the_heads_of_training_are_passed_over(self, make, family):
        made = make(family, "ForMaskedLM")
        body = SimpleNamespace(
            model=made.model.base_model, tokenizer=made.tokenizer, types=made.types
        )
        expected = [reference(body, text).last_hidden_state[0] for text in TEXTS]
        with LLM(made.folder) as llm:
            assert llm.engine.tasks == ("embed", "token_embed")
            same(
                llm.encode(TEXTS, pooling_task="embed", use_tqdm=False),
                [unit(one.mean(0)) for one in expected],
            )

    def test_classes(self, make, family):
        made = make(family, "ForSequenceClassification", num_labels=3)
        logits = [reference(made, text).logits[0] for text in TEXTS]
        with LLM(made.folder) as llm:
            assert "classify" in llm.engine.tasks and "score" not in llm.engine.tasks
            for output, one in zip(llm.classify(TEXTS, use_tqdm=False), logits, strict=True):
                np.testing.assert_allclose(output.outputs.probs, one.softmax(0), atol=2e-5)
            raw = llm.encode(
                TEXTS, PoolingParams(task="classify", use_activation=False), use_tqdm=False
            )
            same(raw, logits, atol=5e-5)

    def test_classes_of_tokens(self, make, family):
        made = make(family, "ForTokenClassification", num_labels=5)
        with LLM(made.folder) as llm:
            assert llm.engine.tasks == ("token_classify",)
            outputs = llm.encode(TEXTS, pooling_task="token_classify", use_tqdm=False)
            same(outputs, [reference(made, text).logits[0].softmax(-1) for text in TEXTS])

    def test_pairs(self, make, family):
        made = make(family, "ForSequenceClassification", num_labels=1)
        expected = [float(reference(made, QUERY, text).logits[0].sigmoid()) for text in TEXTS[:4]]
        with LLM(made.folder) as llm:
            outputs = llm.score(QUERY, TEXTS[:4], use_tqdm=False)
            ranked = llm.rerank(QUERY, TEXTS[:4], top_n=2, use_tqdm=False)
        np.testing.assert_allclose(
            [output.outputs.score for output in outputs], expected, atol=2e-5
        )
        order = sorted(range(4), key=lambda i: -expected[i])[:2]
        assert [(result.index, result.document) for result in ranked] == [
            (i, TEXTS[i]) for i in order
        ]

    def test_no_more_tokens_than_positions(self, make, family):
        made = make(family, "Model")
        longest = " ".join(WORDS[:62])
        too_long = " ".join(WORDS[:63])
        with LLM(made.folder) as llm:
            expected = unit(reference(made, longest).last_hidden_state[0].mean(0))
            same(llm.encode(longest, pooling_task="embed", use_tqdm=False), [expected])
            with pytest.raises(
                ContextLengthError, match=r"65 tokens; .* maximum context length is 64 tokens"
            ):
                llm.embed(too_long)
            same(
                llm.encode(
                    too_long, pooling_task="embed", truncate_prompt_tokens=-1, use_tqdm=False
                ),
                [expected],
            )
        with pytest.raises(
            ConfigError, match="max_model_len is 65, but the checkpoint has 64 positions"
        ):
            LLM(made.folder, max_model_len=65)


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_heads_that_kernels_can_compute(make, backend):
    made = make("Bert", "Model", hidden_size=64)
    expected = [unit(reference(made, text).last_hidden_state[0].mean(0)) for text in TEXTS]
    with LLM(made.folder, attention_backend=backend) as llm:
        same(llm.encode(TEXTS, pooling_task="embed", use_tqdm=False), expected)


def test_the_types_of_tokens_count(make):
    """Token types matter for BERT: without this, test_pairs would show nothing."""
    made = make("Bert", "ForSequenceClassification", num_labels=1)
    inputs = made.tokenizer(QUERY, TEXTS[0], return_tensors="pt", return_token_type_ids=False)
    with torch.inference_mode():
        without = made.model(**inputs).logits
    assert abs(float(without - reference(made, QUERY, TEXTS[0]).logits)) > 0.01


def test_a_batch_of_pairs_and_single_texts(make):
    made = make("Bert", "ForSequenceClassification", num_labels=1)
    given = [
        (QUERY, TEXTS[0]),
        TEXTS[1],
        (TEXTS[3], QUERY),
        {"prompt": TEXTS[2]},
        (TEXTS[0], TEXTS[0]),
    ]
    expected = []
    for one in given:
        texts = one["prompt"] if isinstance(one, dict) else one
        if isinstance(texts, str):
            texts = (texts,)
        expected.append(reference(made, *texts).logits[0].sigmoid())
    with LLM(made.folder) as llm:
        same(llm.encode(given, pooling_task="score", use_tqdm=False), expected)


def test_a_cross_encoder_that_says_identity_scores_logits(make, tmp_path):
    made = make("Bert", "ForSequenceClassification", num_labels=1)
    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    said = {
        "sentence_transformers": {
            "activation_fn": "torch.nn.modules.linear.Identity",
            "version": "5.0.0",
        }
    }
    (tmp_path / "config.json").write_text(json.dumps(config | said))
    logits = [float(reference(made, QUERY, text).logits) for text in TEXTS[:3]]
    with LLM(str(tmp_path)) as llm:
        scores = [output.outputs.score for output in llm.score(QUERY, TEXTS[:3], use_tqdm=False)]
        asked = llm.score(QUERY, TEXTS[:3], PoolingParams(use_activation=True), use_tqdm=False)
    np.testing.assert_allclose(scores, logits, atol=5e-5)
    np.testing.assert_allclose(
        [output.outputs.score for output in asked], torch.tensor(logits).sigmoid(), atol=2e-5
    )


@pytest.mark.parametrize("family", ["Bert", "Roberta"])
def test_truncation_is_that_of_transformers(make, family):
    """Special tokens stay; of a pair the longer text is cut first."""
    made = make(family, "ForSequenceClassification", num_labels=1)
    lengths = [(1, 1), (1, 30), (30, 1), (9, 10), (10, 9), (10, 10), (25, 31)]
    pairs = [(" ".join(WORDS[:a]), " ".join(WORDS[50 : 50 + b])) for a, b in lengths]
    with LLM(made.folder) as llm:
        for most in (6, 7, 15, 16, 21, 22, 64):
            outputs = llm.encode(
                [*pairs, TEXTS[1]],
                pooling_task="score",
                truncate_prompt_tokens=most,
                use_tqdm=False,
            )
            rules = {"truncation": "longest_first", "max_length": most}
            theirs = [made.tokenizer(*pair, **rules)["input_ids"] for pair in [*pairs, (TEXTS[1],)]]
            assert [output.prompt_token_ids for output in outputs] == theirs
            same(
                outputs,
                [
                    reference(made, *pair, **rules).logits[0].sigmoid()
                    for pair in [*pairs, (TEXTS[1],)]
                ],
            )
        with pytest.raises(
            RequestError, match=r"3 tokens leave no room for a text beside [34] special tokens"
        ):
            llm.encode(pairs, pooling_task="score", truncate_prompt_tokens=3)


class TestWholePrompts:
    """A model in which each token sees all others is never cut."""

    def test_texts_of_equal_length_meet_in_a_step(self, make, monkeypatch):
        made = make("Bert", "Model")
        with LLM(made.folder, max_num_batched_tokens=64, max_num_seqs=4) as llm:
            executor = llm.engine.client.core.executor
            steps = []
            execute = executor.execute

            def spy(plan):
                steps.append([scheduled.num_tokens for scheduled in plan.scheduled])
                return execute(plan)

            monkeypatch.setattr(executor, "execute", spy)
            texts = [" ".join(WORDS[:length]) for length in (3, 40, 5, 9, 40, 3, 5, 9, 3)]
            outputs = llm.encode(texts, pooling_task="embed", use_tqdm=False)
            same(
                outputs,
                [unit(reference(made, text).last_hidden_state[0].mean(0)) for text in texts],
            )
            lengths = [length for step in steps for length in step]
            assert lengths == sorted(lengths) == [5, 5, 5, 7, 7, 11, 11, 42, 42]

    @pytest.mark.parametrize(
        "options", [{"enable_chunked_prefill": True}, {"enable_prefix_caching": True}]
    )
    def test_the_default_budget_holds_the_longest_text(self, make, tmp_path, options):
        folder = shutil.copytree(make("ModernBert", "Model").folder, tmp_path / "long")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 5000}))
        with LLM(str(folder), max_num_seqs=4, **options) as llm:
            assert (
                len(llm.embed(" ".join(WORDS[:60] * 70), use_tqdm=False)[0].prompt_token_ids)
                == 4202
            )

    def test_a_small_budget_is_raised(self, make):
        made = make("Bert", "Model")
        with LLM(made.folder, max_num_batched_tokens=16, max_num_seqs=4) as llm:
            assert llm.config.scheduler.max_num_batched_tokens == 64
            same(
                llm.encode(TEXTS, pooling_task="embed", use_tqdm=False),
                [unit(reference(made, text).last_hidden_state[0].mean(0)) for text in TEXTS],
            )

    @pytest.mark.parametrize(
        "options",
        [
            {"enable_chunked_prefill": True},
            {"enable_chunked_prefill": True, "enable_prefix_caching": True},
        ],
    )
    def test_asked_for_chunks(self, make, options):
        made = make("Bert", "Model")
        with LLM(made.folder, max_num_batched_tokens=20, max_num_seqs=4, **options) as llm:
            short = [TEXTS[0], TEXTS[2], TEXTS[3]] * 2
            outputs = llm.encode(short, pooling_task="embed", use_tqdm=False)
            same(
                outputs,
                [unit(reference(made, text).last_hidden_state[0].mean(0)) for text in short],
            )
            assert not any(output.num_cached_tokens for output in outputs)
            with pytest.raises(
                ContextLengthError,
                match=r"52 tokens; embed needs them all in one step.*20 \(max_num_batched_tokens\)",
            ):
                llm.embed(TEXTS[1])

    def test_prefix_caching_finds_nothing_and_takes_no_memory(self, make):
        made = make("Bert", "Model")
        with LLM(made.folder, enable_prefix_caching=True) as llm:
            assert llm.engine.client.core.kv_cache.pools == []
            for _ in range(2):
                (output,) = llm.encode(TEXTS[1], pooling_task="embed", use_tqdm=False)
                same([output], [unit(reference(made, TEXTS[1]).last_hidden_state[0].mean(0))])
                assert output.num_cached_tokens == 0
