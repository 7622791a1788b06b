"""Checkpoints of sentence-transformers through the whole engine: prompts, longest input, modules
after pooling, dimensions."""

from __future__ import annotations

import asyncio
import json

import httpx
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from toolkit_lm import LLM, AsyncLLM, PoolingParams, VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError, ContextLengthError, RequestError
from toolkit_lm_devkit import make_checkpoint, randomize
from toolkit_lm_server.app import create_app
from torch.nn.functional import normalize

HOME = "sentence_transformers.models"
TEXTS = ["some text", "x", "Another Text, and a longer one.", "exactly the same"]
PROMPTS = {"query": "Query: ", "document": "Doc: ", "plain": ""}
WEIGHTS = torch.Generator().manual_seed(3)
WEIGHT = torch.randn(20, 48, generator=WEIGHTS)
BIAS = torch.randn(20, generator=WEIGHTS)


def write_modules(folder, *modules, **general):
    """`modules`: (type, its config.json)."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": f"{HOME}.Transformer"}]
    for index, (kind, config) in enumerate(modules, 1):
        path = f"{index}_{kind}"
        listed.append({"idx": index, "name": str(index), "path": path, "type": f"{HOME}.{kind}"})
        (folder / path).mkdir(exist_ok=True)
        (folder / path / "config.json").write_text(json.dumps(config))
        if kind == "Dense":
            save_file(
                {"linear.weight": WEIGHT, "linear.bias": BIAS}, folder / path / "model.safetensors"
            )
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"__version__": {}} | general)
    )


def pooling(**modes):
    return "Pooling", {
        "word_embedding_dimension": 48,
        **{f"pooling_mode_{name}": on for name, on in modes.items()},
    }


DENSE = (
    "Dense",
    {
        "in_features": 48,
        "out_features": 20,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    },
)
NORMALIZE = "Normalize", {}


class Embedder:
    """A BERT, and what it makes of a text by transformers. Tokens are bytes."""

    def __init__(self, folder):
        self.folder = folder
        shape = {
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        self.model = transformers.BertModel(
            transformers.BertConfig(vocab_size=272, max_position_embeddings=64, **shape)
        ).eval()
        randomize(self.model)
        make_checkpoint(folder, self.model)
        (folder / "sentence_bert_config.json").write_text(
            json.dumps({"max_seq_length": 40, "do_lower_case": False})
        )
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def states(self, text, most=40):
        with torch.inference_mode():
            return self.model(
                torch.tensor([self.tokenizer.encode(text).ids[:most]])
            ).last_hidden_state[0]


@pytest.fixture
def embedder(tmp_path):
    return Embedder(tmp_path)


def dense(vector):
    return torch.tanh(WEIGHT @ vector + BIAS)


def vectors(llm, texts, params=None, **options):
    return [output.outputs.data for output in llm.embed(texts, params, use_tqdm=False, **options)]


def same(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_modules_after_pooling(embedder):
    write_modules(embedder.folder, pooling(mean_tokens=True), DENSE, NORMALIZE)
    expected = [dense(embedder.states(text).mean(0)) for text in TEXTS]
    with LLM(str(embedder.folder), matryoshka=True) as llm:
        same(vectors(llm, TEXTS), [normalize(one, dim=0) for one in expected])
        same(vectors(llm, TEXTS, PoolingParams(normalize=False)), expected)
        same(
            vectors(llm, TEXTS, PoolingParams(dimensions=8)),
            [normalize(one[:8], dim=0) for one in expected],
        )
        same(
            vectors(llm, TEXTS, PoolingParams(dimensions=20)),
            [normalize(one, dim=0) for one in expected],
        )
        with pytest.raises(
            RequestError, match="dimensions is 21, but the model's embeddings have 20"
        ) as raised:
            llm.embed(TEXTS, PoolingParams(dimensions=21))
        assert raised.value.param == "dimensions"
        # Each token's vector is the transformer's own.
        (tokens,) = llm.encode(
            TEXTS[0], PoolingParams(task="token_embed", normalize=False), use_tqdm=False
        )
        same([tokens.outputs.data], [embedder.states(TEXTS[0])])


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
        same(
            vectors(llm, TEXTS, PoolingParams(dimensions=40)),
            [normalize(one[:40], dim=0) for one in means],
        )


class TestPrompts:
    @pytest.fixture(autouse=True)
    def files(self, embedder):
        write_modules(
            embedder.folder,
            pooling(mean_tokens=True),
            NORMALIZE,
            prompts=PROMPTS,
            default_prompt_name="query",
        )

    def expected(self, embedder, prompt):
        return [normalize(embedder.states(prompt + text).mean(0), dim=0) for text in TEXTS]

    def test_by_name(self, embedder):
        with LLM(str(embedder.folder)) as llm:
            for name, prompt in PROMPTS.items():
                same(vectors(llm, TEXTS, prompt_name=name), self.expected(embedder, prompt))
            same(vectors(llm, TEXTS), self.expected(embedder, PROMPTS["query"]))
            names = ["query", "document", None, "plain"]
            each = [
                self.expected(embedder, PROMPTS[name or "query"])[place]
                for place, name in enumerate(names)
            ]
            same(vectors(llm, TEXTS, prompt_name=names), each)
            with pytest.raises(RequestError, match=r"no prompt 'qeury'.*query"):
                llm.embed(TEXTS, prompt_name="qeury")
            with pytest.raises(RequestError, match="prompt_name"):
                llm.embed(TEXTS, prompt_name=["query"])
            with pytest.raises(RequestError, match="empty"):
                llm.embed("")
            # Token ids are as they are.
            ids = embedder.tokenizer.encode(TEXTS[0]).ids
            same(
                vectors(llm, {"prompt_token_ids": ids}),
                [normalize(embedder.states(TEXTS[0]).mean(0), dim=0)],
            )

    def test_queries_and_documents_are_scored_with_their_own(self, embedder):
        queries = self.expected(embedder, "Query: ")
        documents = self.expected(embedder, "Doc: ")
        with LLM(str(embedder.folder)) as llm:
            scores = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
            pairwise = [
                output.outputs.score for output in llm.score(TEXTS, TEXTS[::-1], use_tqdm=False)
            ]
        np.testing.assert_allclose(
            scores, [float(queries[0] @ one) for one in documents], atol=2e-5
        )
        np.testing.assert_allclose(
            pairwise,
            [float(a @ b) for a, b in zip(queries, documents[::-1], strict=True)],
            atol=2e-5,
        )

    @pytest.mark.parametrize("name", ["query", "passage"])
    def test_the_default_prompt_is_not_for_sides_without_a_prompt(self, embedder, name):
        write_modules(
            embedder.folder,
            pooling(mean_tokens=True),
            NORMALIZE,
            prompts={name: "Query: "},
            default_prompt_name=name,
        )
        prompted = self.expected(embedder, "Query: ")
        plain = self.expected(embedder, "")
        query = prompted[0] if name == "query" else plain[0]

        async def ask():
            async with AsyncLLM(
                VllmConfig.make(model=str(embedder.folder), engine_process=False)
            ) as llm:
                transport = httpx.ASGITransport(create_app(llm, None))
                async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                    body = {"texts": TEXTS, "input_type": "search_document"}
                    return (await client.post("/v2/embed", json=body)).json()["embeddings"]["float"]

        same(asyncio.run(ask()), plain)
        with LLM(str(embedder.folder)) as llm:
            same(vectors(llm, TEXTS), prompted)
            same(vectors(llm, TEXTS, prompt_name="document"), plain)
            scores = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
        np.testing.assert_allclose(scores, [float(query @ one) for one in plain], atol=2e-5)


class TestInput:
    def test_the_longest_input(self, embedder):
        write_modules(embedder.folder, pooling(mean_tokens=True))
        with LLM(str(embedder.folder)) as llm:
            assert llm.config.max_model_len == 40
            with pytest.raises(
                ContextLengthError, match=r"41 tokens; .* maximum context length is 40 tokens"
            ):
                llm.embed("y" * 41)
            same(
                vectors(llm, ["y" * 39 + "zzz"], truncate_prompt_tokens=-1),
                [embedder.states("y" * 39 + "z").mean(0)],
            )
            same(
                vectors(llm, TEXTS, truncate_prompt_tokens=7),
                [embedder.states(text, 7).mean(0) for text in TEXTS],
            )
        # Whoever asks for more gets it.
        with LLM(str(embedder.folder), max_model_len=64) as llm:
            same(vectors(llm, "y" * 41), [embedder.states("y" * 41, 64).mean(0)])
        with pytest.raises(ConfigError, match="but the checkpoint has 64 positions"):
            LLM(str(embedder.folder), max_model_len=65)

    @pytest.mark.parametrize(("stated", "longest"), [(23, 23), (10**30, 64), (100, 64)])
    def test_the_longest_input_of_new_versions_stands_with_the_tokenizer(
        self, embedder, stated, longest
    ):
        write_modules(embedder.folder, pooling(mean_tokens=True))
        (embedder.folder / "sentence_bert_config.json").write_text(
            json.dumps({"transformer_task": "feature-extraction"})
        )
        file = embedder.folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": stated}))
        with LLM(str(embedder.folder)) as llm:
            assert llm.config.max_model_len == longest

    def test_lower_case(self, embedder):
        write_modules(embedder.folder, pooling(mean_tokens=True), prompts={"query": "Q "})
        (embedder.folder / "sentence_bert_config.json").write_text(
            json.dumps({"max_seq_length": 40, "do_lower_case": True})
        )
        with LLM(str(embedder.folder)) as llm:
            same(vectors(llm, TEXTS), [embedder.states(text.lower()).mean(0) for text in TEXTS])
            same(
                vectors(llm, TEXTS, prompt_name="query"),
                [embedder.states("q " + text.lower()).mean(0) for text in TEXTS],
            )


SIMILARITIES = {
    "cosine": lambda a, b: a @ b / (np.sqrt((a * a).sum()) * np.sqrt((b * b).sum())),
    "dot": lambda a, b: a @ b,
    "euclidean": lambda a, b: -np.sqrt(((a - b) ** 2).sum()),
    "manhattan": lambda a, b: -np.abs(a - b).sum(),
}


class TestSimilarity:
    """Means of a query and documents, which have prompts of their own. The vectors are as long as
    the modules leave them."""

    def means(self, embedder, prompts=PROMPTS):
        states = [embedder.states(prompts["query"] + TEXTS[0])] + [
            embedder.states(prompts["document"] + text) for text in TEXTS
        ]
        query, *documents = [one.mean(0).double().numpy() for one in states]
        return query, documents

    def scores(self, llm, **options):
        return [
            output.outputs.score for output in llm.score(TEXTS[0], TEXTS, use_tqdm=False, **options)
        ]

    @pytest.mark.parametrize("modules", [[], [NORMALIZE]], ids=["any length", "length 1"])
    @pytest.mark.parametrize("name", [None, *SIMILARITIES])
    def test_it_is_the_checkpoints(self, embedder, caplog, name, modules):
        write_modules(
            embedder.folder,
            pooling(mean_tokens=True),
            *modules,
            similarity_fn_name=name,
            prompts=PROMPTS,
        )
        query, documents = self.means(embedder)
        if modules:
            query, *documents = (one / np.linalg.norm(one) for one in (query, *documents))
        expected = [SIMILARITIES[name or "cosine"](query, one) for one in documents]
        with LLM(str(embedder.folder)) as llm:
            np.testing.assert_allclose(self.scores(llm), expected, rtol=1e-5, atol=1e-5)
            ranked = llm.rerank(TEXTS[0], TEXTS, use_tqdm=False)
        assert [result.index for result in ranked] == sorted(
            range(len(TEXTS)), key=lambda i: -expected[i]
        )
        assert "scores are not those" not in caplog.text

    @pytest.mark.parametrize("name", ["dot", "euclidean", "manhattan"])
    def test_without_modules_no_length_is_changed(self, embedder, name):
        (embedder.folder / "config_sentence_transformers.json").write_text(
            json.dumps({"similarity_fn_name": name, "prompts": PROMPTS})
        )
        query, documents = self.means(embedder)
        plain = [SIMILARITIES[name](query, one) for one in documents]
        unit = [one / np.linalg.norm(one) for one in (query, *documents)]
        of_length_1 = [SIMILARITIES[name](unit[0], one) for one in unit[1:]]
        with LLM(str(embedder.folder)) as llm:
            # An embedding has length 1 where there is no modules.json.
            same(vectors(llm, TEXTS, prompt_name="document"), unit[1:])
            np.testing.assert_allclose(self.scores(llm), plain, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(
                self.scores(llm, pooling_params=PoolingParams(normalize=True)),
                of_length_1,
                rtol=1e-5,
                atol=1e-5,
            )
            with pytest.raises(RequestError, match="params must be PoolingParams, not a dict"):
                self.scores(llm, pooling_params={"normalize": True})
        with LLM(str(embedder.folder), normalize=True) as llm:
            np.testing.assert_allclose(self.scores(llm), of_length_1, rtol=1e-5, atol=1e-5)

    def test_the_server_compares_likewise(self, embedder):
        write_modules(
            embedder.folder,
            pooling(mean_tokens=True),
            similarity_fn_name="euclidean",
            prompts=PROMPTS,
        )
        query, documents = self.means(embedder)
        expected = [SIMILARITIES["euclidean"](query, one) for one in documents]
        order = sorted(range(len(TEXTS)), key=lambda i: -expected[i])

        async def ask():
            async with AsyncLLM(
                VllmConfig.make(model=str(embedder.folder), engine_process=False)
            ) as llm:
                transport = httpx.ASGITransport(create_app(llm, None))
                async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                    body = {"query": TEXTS[0], "documents": TEXTS}
                    scores = await client.post(
                        "/score", json={"queries": TEXTS[0], "documents": TEXTS}
                    )
                    return scores, [
                        await client.post(path, json=body)
                        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
                    ]

        scores, rerankings = asyncio.run(ask())
        np.testing.assert_allclose(
            [one["score"] for one in scores.json()["data"]], expected, rtol=1e-5
        )
        for response in rerankings:
            results = response.json()["results"]
            assert [one["index"] for one in results] == order
            np.testing.assert_allclose(
                [one["relevance_score"] for one in results], [expected[i] for i in order], rtol=1e-5
            )


def left_out(**modes):
    kind, config = pooling(**modes)
    return kind, config | {"include_prompt": False}


def by_hand(method, states, start):
    """Pooled vector of the states [tokens, H] of a text without the first `start`. Weights count
    from the first state all the same."""
    rest = states[start:]
    if method == "weightedmean_tokens":
        weights = torch.arange(start + 1, len(states) + 1)
        return (rest * weights[:, None]).sum(0) / weights.sum()
    return {
        "cls_token": lambda: rest[0],
        "lasttoken": lambda: rest[-1],
        "max_tokens": lambda: rest.amax(0),
        "mean_tokens": lambda: rest.mean(0),
        "mean_sqrt_len_tokens": lambda: rest.sum(0) / len(rest) ** 0.5,
    }[method]()


class TestPromptsThatAreLeftOut:
    """`include_prompt: false`. The prompt's tokens are read, and have no part in the vector; "<s>"
    and "</s>" stand around a text."""

    METHODS = (
        "cls_token",
        "max_tokens",
        "mean_tokens",
        "mean_sqrt_len_tokens",
        "weightedmean_tokens",
        "lasttoken",
    )
    # "<s>Query: ", without "</s>".
    START = 1 + len("Query: ")

    @pytest.fixture(autouse=True)
    def special_tokens(self, embedder):
        embedder.tokenizer.post_processor = TemplateProcessing(
            "<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
        embedder.tokenizer.save(str(embedder.folder / "tokenizer.json"))

    @pytest.mark.parametrize("method", METHODS)
    def test_each_method(self, embedder, method):
        write_modules(embedder.folder, left_out(**{method: True}), prompts=PROMPTS)
        expected = [
            by_hand(method, embedder.states("Query: " + text), self.START) for text in TEXTS
        ]
        without = [by_hand(method, embedder.states(text), 0) for text in TEXTS]
        with LLM(str(embedder.folder)) as llm:
            same(vectors(llm, TEXTS, prompt_name="query"), expected)
            same(vectors(llm, TEXTS), without)
            # In one step.
            names = ["query", None, "plain", "query"]
            same(
                vectors(llm, TEXTS, prompt_name=names),
                [(expected if name == "query" else without)[i] for i, name in enumerate(names)],
            )

    def test_side_by_side_and_compared(self, embedder):
        write_modules(
            embedder.folder,
            left_out(mean_tokens=True, cls_token=True),
            prompts=PROMPTS,
            similarity_fn_name="dot",
        )

        def vector(prompt, text):
            states = embedder.states(prompt + text)
            start = 1 + len(prompt)
            return torch.cat([states[start], states[start:].mean(0)])

        with LLM(str(embedder.folder)) as llm:
            same(
                vectors(llm, TEXTS, prompt_name="document"),
                [vector("Doc: ", text) for text in TEXTS],
            )
            scores = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
        np.testing.assert_allclose(
            scores,
            [vector("Query: ", TEXTS[0]) @ vector("Doc: ", text) for text in TEXTS],
            rtol=1e-5,
        )

    def test_what_is_not_left_out(self, embedder):
        write_modules(
            embedder.folder,
            left_out(mean_tokens=True),
            prompts=PROMPTS,
            default_prompt_name="query",
        )
        states = embedder.states("Query: " + TEXTS[0])
        with LLM(str(embedder.folder)) as llm:
            same(vectors(llm, TEXTS[0]), [states[self.START :].mean(0)])
            # Nobody knows which of them is a prompt's.
            ids = embedder.tokenizer.encode("Query: " + TEXTS[0]).ids
            same(vectors(llm, {"prompt_token_ids": ids}), [states.mean(0)])
            (tokens,) = llm.encode(
                TEXTS[0], PoolingParams(task="token_embed", normalize=False), use_tqdm=False
            )
            same([tokens.outputs.data], [states])
        with LLM(str(embedder.folder), pooling_type="MEAN") as llm:
            same(vectors(llm, TEXTS[0]), [states.mean(0)])

    def test_a_text_of_which_nothing_is_left(self, embedder):
        write_modules(embedder.folder, left_out(mean_tokens=True), prompts=PROMPTS)
        with LLM(str(embedder.folder)) as llm:
            assert len(
                vectors(llm, TEXTS, prompt_name="query", truncate_prompt_tokens=self.START + 1)
            ) == len(TEXTS)
            with pytest.raises(
                RequestError,
                match="none of the 8 tokens is left to pool: 8 belong to the checkpoint's prompt",
            ):
                llm.embed(TEXTS[0], prompt_name="query", truncate_prompt_tokens=self.START)
            # That of one text is no error of the others.
            params = [PoolingParams()] * 2
            bad, good = llm.engine.processor.pooling.prepare_batch(
                ["0", "1"],
                TEXTS[:2],
                params,
                prompt_name=["query", "document"],
                truncate_prompt_tokens=self.START,
            )
            assert isinstance(bad, RequestError)
            llm.engine.submit(good)
            (output,) = llm.engine.step()
            document = embedder.states("Doc: x")
            same([output.outputs.data], [document[1 + len("Doc: ") :].mean(0)])

    @pytest.mark.parametrize("texts_end", ["</s>", None])
    @pytest.mark.parametrize("prompt", ["Instruct: find it.", "Ends with</s>"])
    def test_one_special_token_at_a_prompts_end_is_not_its_own(self, embedder, prompt, texts_end):
        """Special tokens are counted like in sentence-transformers, whoever put them there."""
        ends = [("</s>", 1)] if texts_end else []
        embedder.tokenizer.post_processor = TemplateProcessing(
            f"$A {texts_end or ''}".strip(), special_tokens=ends
        )
        embedder.tokenizer.save(str(embedder.folder / "tokenizer.json"))
        write_modules(embedder.folder, left_out(mean_tokens=True), prompts={"query": prompt})
        ids = embedder.tokenizer.encode(prompt).ids
        states = embedder.states(prompt + "x")
        with LLM(str(embedder.folder)) as llm:
            same(
                vectors(llm, "x", prompt_name="query"),
                [states[len(ids) - (ids[-1] == 1) :].mean(0)],
            )


def test_what_is_not_understood_is_refused_at_start(embedder):
    write_modules(embedder.folder, pooling(mean_tokens=True, median_tokens=True))
    with pytest.raises(CheckpointError, match="pooling_mode_median_tokens"):
        LLM(str(embedder.folder))
    write_modules(embedder.folder, pooling(mean_tokens=True))
    (embedder.folder / "sentence_bert_config.json").write_text(
        json.dumps({"processing_kwargs": {"text": {"add_special_tokens": False}}})
    )
    with pytest.raises(CheckpointError, match="processing_kwargs for 'text'"):
        LLM(str(embedder.folder))


CHUNKED = {
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
    "num_kv_blocks": 64,
}


@pytest.mark.parametrize(
    "method", ["cls_token", "max_tokens", "mean_tokens", "weightedmean_tokens", "lasttoken"]
)
@pytest.mark.parametrize(
    "options",
    [{}, CHUNKED, CHUNKED | {"enable_prefix_caching": True}],
    ids=["whole", "chunked", "prefix cache"],
)
def test_a_prompt_that_is_left_out_in_chunks(make_llama, tmp_path, method, options):
    """Chunks end within the prompt, with it, and after it."""
    _, model = make_llama("pooled", hidden_size=48, num_attention_heads=4)
    make_checkpoint(tmp_path, model)
    prompts = {
        name: "i" * length
        for name, length in (("short", 3), ("chunk", 16), ("more", 21), ("long", 40))
    }
    write_modules(tmp_path, left_out(**{method: True}), prompts=prompts)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = ["one", "another text, which is longer", "x", "y" * 30]
    names = list(prompts)
    expected = []
    for text, name in zip(texts, names, strict=True):
        with torch.inference_mode():
            states = model.model(
                torch.tensor([tokenizer.encode(prompts[name] + text).ids])
            ).last_hidden_state[0]
        expected.append(by_hand(method, states, len(prompts[name])))
    with LLM(str(tmp_path), device="cpu", dtype="float32", **options) as llm:
        for _ in range(2):
            same(vectors(llm, texts, prompt_name=names), expected)


def test_a_prompt_is_left_out_in_an_engine_process_too(embedder):
    write_modules(embedder.folder, left_out(mean_tokens=True), prompts=PROMPTS)
    with LLM(str(embedder.folder), engine_process=True) as llm:
        same(
            vectors(llm, TEXTS, prompt_name="query"),
            [embedder.states("Query: " + text)[len("Query: ") :].mean(0) for text in TEXTS],
        )


def test_a_language_model_with_modules_pools(make_llama, tmp_path):
    _, model = make_llama("pooled", hidden_size=48, num_attention_heads=4)
    make_checkpoint(tmp_path, model)
    write_modules(tmp_path, pooling(lasttoken=True), NORMALIZE, prompts={"query": "Q: "})
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    with torch.inference_mode():
        expected = [
            model.model(torch.tensor([tokenizer.encode("Q: " + text).ids])).last_hidden_state[0, -1]
            for text in TEXTS
        ]
    with LLM(str(tmp_path)) as llm:
        assert (llm.config.model.runner, llm.config.model.convert) == ("pooling", "embed")
        same(vectors(llm, TEXTS, prompt_name="query"), [normalize(one, dim=0) for one in expected])
    # Unless it is told to generate.
    with LLM(str(tmp_path), runner="generate", num_kv_blocks=64) as llm:
        assert llm.engine.tasks == ("generate",)
