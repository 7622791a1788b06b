"""Checkpoints of sentence-transformers through the whole engine: prompts, longest input, modules after pooling, dimensions."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from llm_toolkit import LLM, PoolingParams
from llm_toolkit.errors import CheckpointError, ConfigError, ContextLengthError, RequestError
from llm_toolkit.testing import make_checkpoint, randomize
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn.functional import normalize

HOME = "sentence_transformers.models"
TEXTS = ["some text", "x", "Another Text, and a longer one.", "exactly the same"]
PROMPTS = {"query": "Query: ", "document": "Doc: ", "plain": ""}
WEIGHTS = torch.Generator().manual_seed(3)
WEIGHT, BIAS = torch.randn(20, 48, generator=WEIGHTS), torch.randn(20, generator=WEIGHTS)


def write_modules(folder, *modules, **general):
    """`modules`: (type, its config.json)."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": f"{HOME}.Transformer"}]
    for index, (kind, config) in enumerate(modules, 1):
        path = f"{index}_{kind}"
        listed.append({"idx": index, "name": str(index), "path": path, "type": f"{HOME}.{kind}"})
        (folder / path).mkdir(exist_ok=True)
        (folder / path / "config.json").write_text(json.dumps(config))
        if kind == "Dense":
            save_file({"linear.weight": WEIGHT, "linear.bias": BIAS}, folder / path / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"__version__": {}} | general))


def pooling(**modes):
    return "Pooling", {"word_embedding_dimension": 48, **{f"pooling_mode_{name}": on for name, on in modes.items()}}


DENSE = "Dense", {"in_features": 48, "out_features": 20, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}
NORMALIZE = "Normalize", {}


class Embedder:
    """A BERT, and what it makes of a text by transformers. Tokens are bytes."""

    def __init__(self, folder):
        self.folder = folder
        shape = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.model = transformers.BertModel(transformers.BertConfig(vocab_size=272, max_position_embeddings=64, **shape)).eval()
        randomize(self.model)
        make_checkpoint(folder, self.model)
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 40, "do_lower_case": False}))
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def states(self, text, most=40):
        with torch.inference_mode():
            return self.model(torch.tensor([self.tokenizer.encode(text).ids[:most]])).last_hidden_state[0]


@pytest.fixture
def embedder(tmp_path):
    return Embedder(tmp_path)


def dense(vector):
    return torch.tanh(WEIGHT @ vector + BIAS)


def vectors(llm, texts, params=None, **options):
    return [output.embedding for output in llm.embed(texts, params, use_tqdm=False, **options)]


def same(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_modules_after_pooling(embedder):
    write_modules(embedder.folder, pooling(mean_tokens=True), DENSE, NORMALIZE)
    expected = [dense(embedder.states(text).mean(0)) for text in TEXTS]
    with LLM(str(embedder.folder)) as llm:
        same(vectors(llm, TEXTS), [normalize(one, dim=0) for one in expected])
        same(vectors(llm, TEXTS, PoolingParams(normalize=False)), expected)
        same(vectors(llm, TEXTS, PoolingParams(dimensions=8)), [normalize(one[:8], dim=0) for one in expected])
        same(vectors(llm, TEXTS, PoolingParams(dimensions=20)), [normalize(one, dim=0) for one in expected])
        with pytest.raises(RequestError, match="dimensions is 21, but the model's embeddings have 20") as raised:
            llm.embed(TEXTS, PoolingParams(dimensions=21))
        assert raised.value.param == "dimensions"
        # Each token's vector is the transformer's own.
        (tokens,) = llm.encode(TEXTS[0], PoolingParams(task="token_embed", normalize=False), use_tqdm=False)
        same([tokens.data], [embedder.states(TEXTS[0])])


def test_several_methods_side_by_side(embedder):
    write_modules(embedder.folder, pooling(cls_token=True, max_tokens=True))
    states = [embedder.states(text) for text in TEXTS]
    with LLM(str(embedder.folder)) as llm:
        # No module normalizes.
        same(vectors(llm, TEXTS), [torch.cat([one[0], one.amax(0)]) for one in states])


def test_no_dimensions_but_the_first(embedder):
    write_modules(embedder.folder, pooling(mean_tokens=True), NORMALIZE, truncate_dim=16)
    means = [embedder.states(text).mean(0) for text in TEXTS]
    with LLM(str(embedder.folder)) as llm:
        same(vectors(llm, TEXTS), [normalize(one[:16], dim=0) for one in means])
        same(vectors(llm, TEXTS, PoolingParams(dimensions=40)), [normalize(one[:40], dim=0) for one in means])


class TestPrompts:
    @pytest.fixture(autouse=True)
    def files(self, embedder):
        write_modules(embedder.folder, pooling(mean_tokens=True), NORMALIZE, prompts=PROMPTS, default_prompt_name="query")

    def expected(self, embedder, prompt):
        return [normalize(embedder.states(prompt + text).mean(0), dim=0) for text in TEXTS]

    def test_by_name(self, embedder):
        with LLM(str(embedder.folder)) as llm:
            for name, prompt in PROMPTS.items():
                same(vectors(llm, TEXTS, prompt_name=name), self.expected(embedder, prompt))
            same(vectors(llm, TEXTS), self.expected(embedder, PROMPTS["query"]))
            names = ["query", "document", None, "plain"]
            each = [self.expected(embedder, PROMPTS[name or "query"])[place] for place, name in enumerate(names)]
            same(vectors(llm, TEXTS, prompt_name=names), each)
            with pytest.raises(RequestError, match=r"no prompt 'qeury'.*query"):
                llm.embed(TEXTS, prompt_name="qeury")
            with pytest.raises(RequestError, match="prompt_name"):
                llm.embed(TEXTS, prompt_name=["query"])
            with pytest.raises(RequestError, match="empty"):
                llm.embed("")
            # Token ids are as they are.
            ids = embedder.tokenizer.encode(TEXTS[0]).ids
            same(vectors(llm, {"prompt_token_ids": ids}), [normalize(embedder.states(TEXTS[0]).mean(0), dim=0)])

    def test_queries_and_documents_are_scored_with_their_own(self, embedder):
        queries, documents = self.expected(embedder, "Query: "), self.expected(embedder, "Doc: ")
        with LLM(str(embedder.folder)) as llm:
            scores = [output.score for output in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
            pairwise = [output.score for output in llm.score(TEXTS, TEXTS[::-1], use_tqdm=False)]
        np.testing.assert_allclose(scores, [float(queries[0] @ one) for one in documents], atol=2e-5)
        np.testing.assert_allclose(pairwise, [float(a @ b) for a, b in zip(queries, documents[::-1], strict=True)], atol=2e-5)


class TestInput:
    def test_the_longest_input(self, embedder):
        write_modules(embedder.folder, pooling(mean_tokens=True))
        with LLM(str(embedder.folder)) as llm:
            assert llm.config.max_model_len == 40
            with pytest.raises(ContextLengthError, match="41 tokens; it must stay within max_model_len, 40"):
                llm.embed("y" * 41)
            same(vectors(llm, ["y" * 39 + "zzz"], truncate_prompt_tokens=-1), [embedder.states("y" * 39 + "z").mean(0)])
            same(vectors(llm, TEXTS, truncate_prompt_tokens=7), [embedder.states(text, 7).mean(0) for text in TEXTS])
        # Whoever asks for more gets it.
        with LLM(str(embedder.folder), max_model_len=64) as llm:
            same(vectors(llm, "y" * 41), [embedder.states("y" * 41, 64).mean(0)])
        with pytest.raises(ConfigError, match="more than the checkpoint's positions, 64"):
            LLM(str(embedder.folder), max_model_len=65)

    @pytest.mark.parametrize(("stated", "longest"), [(23, 23), (10**30, 64), (100, 64)])
    def test_the_longest_input_of_new_versions_stands_with_the_tokenizer(self, embedder, stated, longest):
        write_modules(embedder.folder, pooling(mean_tokens=True))
        (embedder.folder / "sentence_bert_config.json").write_text(json.dumps({"transformer_task": "feature-extraction"}))
        file = embedder.folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": stated}))
        with LLM(str(embedder.folder)) as llm:
            assert llm.config.max_model_len == longest

    def test_lower_case(self, embedder):
        write_modules(embedder.folder, pooling(mean_tokens=True), prompts={"query": "Q "})
        (embedder.folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 40, "do_lower_case": True}))
        with LLM(str(embedder.folder)) as llm:
            same(vectors(llm, TEXTS), [embedder.states(text.lower()).mean(0) for text in TEXTS])
            same(vectors(llm, TEXTS, prompt_name="query"), [embedder.states("q " + text.lower()).mean(0) for text in TEXTS])


@pytest.mark.parametrize(("similarity", "warns"), [("dot", True), ("cosine", False), (None, False)])
def test_scores_that_are_not_the_checkpoints_are_said_to_be(embedder, caplog, similarity, warns):
    write_modules(embedder.folder, pooling(mean_tokens=True), similarity_fn_name=similarity)
    with LLM(str(embedder.folder)):
        pass
    assert ("compared by their cosine, not by 'dot'" in caplog.text) == warns


def test_late_interaction(embedder, caplog):
    """Of PyLate: a Dense and nothing that pools. Its own treatment of queries and documents is not ours, and that is said."""
    write_modules(embedder.folder, DENSE, model_type="ColBERT", query_prefix="[Q] ", document_prefix="[D] ", query_length=32)
    with LLM(str(embedder.folder)) as llm:
        assert llm.engine.tasks == ("token_embed",)
        scores = [output.score for output in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
        (tokens,) = llm.encode(TEXTS[0], task="token_embed", prompt_name="query", use_tqdm=False)
        with pytest.raises(RequestError, match="Supported: token_embed"):
            llm.embed(TEXTS)
    for words in ("no token of a document is left out", "queries are not filled up", "no lengths of their own"):
        assert words in caplog.text

    def vectors_of(text):
        return normalize(torch.tanh(embedder.states(text) @ WEIGHT.T + BIAS), dim=-1)

    query = vectors_of("[Q] " + TEXTS[0])
    np.testing.assert_allclose(tokens.data, query, atol=2e-5)
    expected = [float((query @ vectors_of("[D] " + text).T).amax(1).sum()) for text in TEXTS]
    np.testing.assert_allclose(scores, expected, rtol=1e-4)


def test_what_is_not_understood_is_refused_at_start(embedder):
    write_modules(embedder.folder, pooling(mean_tokens=True, median_tokens=True))
    with pytest.raises(CheckpointError, match="pooling_mode_median_tokens"):
        LLM(str(embedder.folder))
    write_modules(embedder.folder, pooling(mean_tokens=True))
    (embedder.folder / "sentence_bert_config.json").write_text(json.dumps({"processing_kwargs": {"text": {"add_special_tokens": False}}}))
    with pytest.raises(CheckpointError, match="processing_kwargs for 'text'"):
        LLM(str(embedder.folder))


def test_a_language_model_with_modules_pools(make_llama, tmp_path):
    _, model = make_llama("pooled", hidden_size=48, num_attention_heads=4)
    make_checkpoint(tmp_path, model)
    write_modules(tmp_path, pooling(lasttoken=True), NORMALIZE, prompts={"query": "Q: "})
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    with torch.inference_mode():
        expected = [model.model(torch.tensor([tokenizer.encode("Q: " + text).ids])).last_hidden_state[0, -1] for text in TEXTS]
    with LLM(str(tmp_path)) as llm:
        assert (llm.config.model.runner, llm.config.model.convert) == ("pooling", "embed")
        same(vectors(llm, TEXTS, prompt_name="query"), [normalize(one, dim=0) for one in expected])
    # Unless it is told to generate.
    with LLM(str(tmp_path), runner="generate", num_kv_blocks=64) as llm:
        assert llm.engine.tasks == ("generate",)
