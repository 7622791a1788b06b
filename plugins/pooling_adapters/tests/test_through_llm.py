"""Adapters through the whole engine: prompts of several lengths in one batch, in chunks, after a
cached prefix; options left auto."""

import json
import sys
import types

import numpy as np
import pytest
import torch
import transformers
from adapter_harness import SMALL, save_tokenizer
from toolkit_lm import LLM
from toolkit_lm.errors import CheckpointError, ConfigError, ContextLengthError, UnsupportedError
from toolkit_lm.model import Absent
from toolkit_lm.plugin import hookimpl
from toolkit_lm_decoder.llama import LlamaForCausalLM
from toolkit_lm_devkit import save_random
from toolkit_lm_poolers import embedding_pooler
from toolkit_lm_pooling_adapters.score_template import score_tokens
from toolkit_lm_pooling_adapters.score_templates import QWEN3_RERANKER

GENERATOR = torch.Generator().manual_seed(1)
PROMPTS = [
    torch.randint(3, SMALL["vocab_size"], (length,), generator=GENERATOR).tolist()
    for length in (3, 50, 1, 17, 50)
]
GIVEN = [{"prompt_token_ids": ids} for ids in PROMPTS]
CHUNKED = {"enable_chunked_prefill": True, "max_num_batched_tokens": 16, "max_num_seqs": 4}


def make(folder, architecture, **more):
    """A checkpoint; tokens are words."""
    config_class = getattr(transformers, architecture).config_class
    save_random(folder, getattr(transformers, architecture)(config_class(**{**SMALL, **more})))
    save_tokenizer(folder, yes=40, no=17)
    return folder


def llm_of(folder, **options):
    return LLM(str(folder), device="cpu", dtype="float32", num_kv_blocks=64, **options)


def by_transformers(auto_class, folder, prompts=PROMPTS):
    model = auto_class.from_pretrained(folder)
    with torch.inference_mode():
        return [model(torch.tensor([ids])) for ids in prompts]


def unit(vector):
    return (vector / vector.norm()).numpy()


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "GemmaForCausalLM"]
)
@pytest.mark.parametrize(
    "options",
    [{}, CHUNKED, {**CHUNKED, "enable_prefix_caching": True}],
    ids=["whole", "chunked", "prefix cache"],
)
def test_embeddings(architecture, options, tmp_path):
    folder = make(tmp_path, architecture)
    expected = [out.last_hidden_state[0] for out in by_transformers(transformers.AutoModel, folder)]
    with llm_of(
        folder,
        convert="embed",
        model_impl="transformers" if architecture == "GemmaForCausalLM" else "auto",
        **options,
    ) as llm:
        for _ in range(2):
            for output, states in zip(llm.embed(GIVEN, use_tqdm=False), expected, strict=True):
                np.testing.assert_allclose(output.outputs.data, unit(states[-1]), atol=2e-5)
        for output, states in zip(
            llm.encode(GIVEN, pooling_task="token_embed", use_tqdm=False), expected, strict=True
        ):
            np.testing.assert_allclose(
                output.outputs.data, torch.nn.functional.normalize(states, dim=-1), atol=2e-5
            )


def test_mean_pooling_over_chunks(tmp_path):
    folder = make(tmp_path, "LlamaForCausalLM")
    expected = [
        unit(out.last_hidden_state[0].mean(0))
        for out in by_transformers(transformers.AutoModel, folder)
    ]
    for options in ({}, CHUNKED):
        with llm_of(folder, convert="embed", pooling_type="MEAN", **options) as llm:
            for output, vector in zip(llm.embed(GIVEN, use_tqdm=False), expected, strict=True):
                np.testing.assert_allclose(output.outputs.data, vector, atol=2e-5)


def test_a_trained_classifier_needs_no_options(tmp_path):
    folder = make(tmp_path, "LlamaForSequenceClassification", num_labels=3)
    expected = [
        out.logits[0].softmax(0)
        for out in by_transformers(transformers.AutoModelForSequenceClassification, folder)
    ]
    with llm_of(folder) as llm:
        assert (llm.config.model.runner, llm.config.model.convert) == ("pooling", "classify")
        for output, probabilities in zip(
            llm.classify(GIVEN, use_tqdm=False), expected, strict=True
        ):
            np.testing.assert_allclose(output.outputs.probs, probabilities, atol=1e-5)


def test_a_known_reranker_reads_its_template(tmp_path, caplog):
    folder = make(
        tmp_path, "Qwen3ForCausalLM", tie_word_embeddings=True, max_position_embeddings=512
    )
    query = "w5 w6 ?"
    documents = ["w7 w8 w9", "w10", "w11 w12 w13 w14"]
    with llm_of(folder, convert="classify", max_model_len=512) as llm:
        prompts = [
            score_tokens(llm.engine.renderer, QWEN3_RERANKER, query, document)
            for document in documents
        ]
        outputs = llm.score(query, documents, use_tqdm=False)
        ranked = llm.rerank(query, documents, use_tqdm=False)
    assert caplog.text.count("It is run as a reranker like Qwen3-Reranker") == 1
    logits = [
        out.logits[0, -1, [17, 40]]
        for out in by_transformers(transformers.AutoModelForCausalLM, folder, prompts)
    ]
    expected = [float(pair.softmax(0)[1]) for pair in logits]
    assert len({round(score, 4) for score in expected}) == 3
    np.testing.assert_allclose([output.outputs.score for output in outputs], expected, atol=1e-5)
    assert [result.index for result in ranked] == sorted(range(3), key=lambda i: -expected[i])


def test_a_document_that_is_too_long_for_its_template(tmp_path):
    """It is an error, or the document is cut: never the end of the template, after which the answer
    stands."""
    folder = make(tmp_path, "Qwen3ForCausalLM")
    document = " ".join(f"w{i % 90 + 5}" for i in range(80))
    with llm_of(folder, convert="classify") as llm:
        longest = llm.config.max_model_len
        assert longest == SMALL["max_position_embeddings"]
        whole = score_tokens(llm.engine.renderer, QWEN3_RERANKER, "w5", document)
        tokens = score_tokens(
            llm.engine.renderer, QWEN3_RERANKER, "w5", document, max_tokens=longest
        )
        tail = len(llm.engine.renderer.render_prompt(QWEN3_RERANKER.pieces[-1]).token_ids)
        assert len(tokens) == longest
        assert tokens[-tail:] == whole[-tail:] != whole[longest - tail : longest]
        with pytest.raises(ContextLengthError):
            llm.score("w5", document, use_tqdm=False)
        (output,) = llm.score("w5", document, truncate_prompt_tokens=-1, use_tqdm=False)
    (logits,) = (
        out.logits[0, -1, [17, 40]]
        for out in by_transformers(transformers.AutoModelForCausalLM, folder, [tokens])
    )
    assert output.outputs.score == pytest.approx(float(logits.softmax(0)[1]), abs=1e-5)


def test_a_reranker_of_sentence_transformers_needs_no_options(tmp_path):
    folder = make(tmp_path, "LlamaForCausalLM")
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
    logits = by_transformers(transformers.AutoModelForCausalLM, folder)
    with llm_of(folder) as llm:
        assert (llm.config.model.runner, llm.config.model.convert) == ("pooling", "classify")
        outputs = llm.encode(GIVEN, pooling_task="score", use_tqdm=False)
    for output, out in zip(outputs, logits, strict=True):
        np.testing.assert_allclose(
            output.outputs.data, out.logits[0, -1, [17, 40]].softmax(0)[1:], atol=1e-5
        )


class FirstTokens:
    """A plugin that adds a convert type."""

    name = "first_tokens"

    @hookimpl
    def toolkit_register_pooling(self, converters):
        converters.add("first_token", "first_tokens_of_a_test:as_first_token_model")


def as_first_token_model(model_class, vllm_config):
    class FirstToken(model_class):
        def __init__(self, *, vllm_config, prefix=""):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            self.lm_head = Absent()
            self.pooler = embedding_pooler(vllm_config, default="CLS", normalize=False)

    assert model_class is LlamaForCausalLM
    return FirstToken


def test_a_convert_type_of_a_third_party(tmp_path, monkeypatch):
    module = types.ModuleType("first_tokens_of_a_test")
    module.as_first_token_model = as_first_token_model
    monkeypatch.setitem(sys.modules, module.__name__, module)
    folder = make(tmp_path, "LlamaForCausalLM")
    expected = [
        out.last_hidden_state[0, 0] for out in by_transformers(transformers.AutoModel, folder)
    ]
    with llm_of(folder, convert="first_token", plugins=[FirstTokens()]) as llm:
        for output, vector in zip(llm.embed(GIVEN, use_tqdm=False), expected, strict=True):
            np.testing.assert_allclose(output.outputs.data, vector, atol=2e-5)
    with pytest.raises(ConfigError, match="no convert type 'first_token'"):
        llm_of(folder, convert="first_token")


def test_what_cannot_be_converted_is_refused(tmp_path):
    folder = make(tmp_path, "LlamaForCausalLM")
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM is not known as a reranker"):
        llm_of(folder, convert="classify")
    with pytest.raises(ConfigError, match="'reward' is for native reward models"):
        llm_of(folder, convert="reward")
    for name, value in {
        "logit_mean": 1.0,
        "normalize": True,
        "pooling_type": "CLS",
        "score_template": "t",
    }.items():
        with pytest.raises(
            ConfigError, match=f"option {name!r} has no effect on an engine that generates only"
        ):
            llm_of(folder, runner="generate", **{name: value})
    with pytest.raises(
        ConfigError, match="option 'use_activation' has no effect on an embedding model"
    ):
        llm_of(folder, convert="embed", use_activation=True)
    with pytest.raises(
        ConfigError, match="option 'use_activation' has no effect on an embedding model"
    ):
        llm_of(folder, extra_tasks=["embed"], use_activation=True)
    with pytest.raises(CheckpointError, match="'maybe not' is 2 tokens"):
        llm_of(
            folder,
            convert="classify",
            classifier_method="no_post_processing",
            classifier_tokens=["maybe not"],
        )
