"""The shipped score templates, against what their models' authors write and tokenize."""

import json
import subprocess
import sys

import msgspec
import pytest
from adapter_harness import config_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from toolkit_lm.config import VllmConfig
from toolkit_lm.plugin import Plugins
from toolkit_lm_pooling_adapters.origin import RERANKERS
from toolkit_lm_pooling_adapters.score_template import score_prompt, score_tokens
from toolkit_lm_pooling_adapters.score_templates import (
    BGE_RERANKER_V2_GEMMA,
    MXBAI_RERANK_V2,
    QWEN3_RERANKER,
    QWEN3_VL_RERANKER,
)
from toolkit_lm_pooling_adapters.template_choice import choose_score_template
from toolkit_lm_renderer_hf.renderer import HfRenderer

QUERY = "Who wrote it?"
DOCUMENT = "Harper Lee.\nIn 1960!"
INSTRUCTION = "Think of books."


def test_qwen3_reranker():
    assert score_prompt(QWEN3_RERANKER, "q", "d") == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the "
        "Query and the Instruct provided. Note that the "
        'answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web '
        "search query, retrieve relevant passages "
        "that answer the query\n<Query>: q\n<Document>: d<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n"
    )
    assert "\n<Instruct>: Find.\n<Query>: q\n" in score_prompt(QWEN3_RERANKER, "q", "d", "Find.")


def test_qwen3_vl_reranker():
    text = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the "
        "Query and the Instruct provided. Note that the "
        'answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a '
        "search query, retrieve relevant candidates that answer the query.<Query>:q\n"
        "<Document>:d<|im_end|>\n<|im_start|>assistant\n"
    )
    assert score_prompt(QWEN3_VL_RERANKER, "q", "d") == text
    assert "<Instruct>: Find.<Query>:q\n" in score_prompt(QWEN3_VL_RERANKER, "q", "d", "Find.")


def test_mxbai_rerank_v2():
    text = (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
        "assistant.<|im_end|>\n<|im_start|>user\nquery: q\n"
        "document: d\nYou are a search relevance expert who evaluates how well documents match "
        "search queries. For each query-document "
        "pair, carefully analyze the semantic relationship between them, then provide your "
        "binary relevance judgment (0 for not relevant, "
        "1 for relevant).\nRelevance:<|im_end|>\n<|im_start|>assistant\n"
    )
    assert score_prompt(MXBAI_RERANK_V2, "q", "d") == text
    assert score_prompt(MXBAI_RERANK_V2, "q", "d", "Find.") == text.replace(
        "query: q", "instruction: Find.\nquery: q"
    )


def test_bge_reranker_v2_gemma():
    assert score_prompt(BGE_RERANKER_V2_GEMMA, "q", "d") == (
        "A: q\nB: d\nGiven a query A and a passage B, determine whether the passage contains an "
        "answer to the query by providing a "
        "prediction of either 'Yes' or 'No'."
    )
    assert score_prompt(BGE_RERANKER_V2_GEMMA, "q", "d", "Well?") == "A: q\nB: d\nWell?"


@pytest.fixture
def renderer(tmp_path):
    """A byte-level tokenizer that merges across line breaks, and begins texts with "<s>"."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(
        [f"query: {QUERY}\ndocument: {DOCUMENT}\n", f"A: {QUERY}\nB: {DOCUMENT}\nThink"] * 20,
        trainer,
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["..."], "vocab_size": 1000})
    )
    return HfRenderer(config_of(tmp_path, max_model_len=512))


def ids(renderer, text):
    return renderer.render_prompt(text, add_special_tokens=False).token_ids


def test_tokens_are_those_of_the_authors(renderer):
    """Each author's procedure, as published: which texts are tokenized apart, and where special
    tokens go."""
    head = QWEN3_RERANKER.pieces[0]
    tail = QWEN3_RERANKER.pieces[2]
    pair = f"<Instruct>: {INSTRUCTION}\n<Query>: {QUERY}\n<Document>: {DOCUMENT}"
    expected = ids(renderer, head) + ids(renderer, pair) + ids(renderer, tail)
    assert score_tokens(renderer, QWEN3_RERANKER, QUERY, DOCUMENT, INSTRUCTION) == expected

    line = ids(renderer, "\n")
    task, tail = (ids(renderer, piece) for piece in MXBAI_RERANK_V2.pieces[-2:])
    query = ids(renderer, f"instruction: {INSTRUCTION}\nquery: {QUERY}")
    document = ids(renderer, f"document: {DOCUMENT}")
    expected = (
        ids(renderer, MXBAI_RERANK_V2.pieces[0]) + query + line + document + line + task + tail
    )
    assert score_tokens(renderer, MXBAI_RERANK_V2, QUERY, DOCUMENT, INSTRUCTION) == expected
    assert expected != ids(renderer, score_prompt(MXBAI_RERANK_V2, QUERY, DOCUMENT, INSTRUCTION))

    query = ids(renderer, f"A: {QUERY}")
    document = ids(renderer, f"B: {DOCUMENT}")
    expected = [
        0,
        *query,
        *line,
        *document,
        *line,
        *ids(renderer, BGE_RERANKER_V2_GEMMA.instruction),
    ]
    assert score_tokens(renderer, BGE_RERANKER_V2_GEMMA, QUERY, DOCUMENT) == expected
    cut = [
        0,
        *query,
        *line,
        *document[:-3],
        *line,
        *ids(renderer, BGE_RERANKER_V2_GEMMA.instruction),
    ]
    assert (
        score_tokens(renderer, BGE_RERANKER_V2_GEMMA, QUERY, DOCUMENT, max_tokens=len(cut)) == cut
    )


def test_known_rerankers_get_their_templates(tmp_path):
    plugins = Plugins.load()
    shipped = {
        "Qwen3ForCausalLM": QWEN3_RERANKER,
        "Qwen3VLForConditionalGeneration": QWEN3_VL_RERANKER,
        "Qwen3VLMoeForConditionalGeneration": QWEN3_VL_RERANKER,
        "Qwen2ForCausalLM": MXBAI_RERANK_V2,
        "GemmaForCausalLM": BGE_RERANKER_V2_GEMMA,
    }
    assert shipped.keys() == RERANKERS.keys()
    for architecture, template in shipped.items():
        config = VllmConfig.default({"architectures": [architecture]}, convert="classify")
        config = msgspec.structs.replace(
            config, checkpoint=msgspec.structs.replace(config.checkpoint, path=str(tmp_path))
        )
        assert choose_score_template(config, plugins) is template
        known = RERANKERS[architecture]
        assert (known.method, known.words) == (
            template.classifier_method,
            template.classifier_tokens,
        )


def test_the_front_needs_no_torch():
    modules = (
        "toolkit_lm_pooling_adapters.score_templates, toolkit_lm_pooling_adapters.template_renderer"
    )
    code = f"import {modules}, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
