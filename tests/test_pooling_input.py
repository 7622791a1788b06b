"""Wrong input for a pooling model offline: each is an error with the parameter's name, and nothing
is computed."""

from __future__ import annotations

import numpy as np
import pytest
from toolkit_lm import LLM, PoolingParams
from toolkit_lm.errors import ConfigError, ContextLengthError, RequestError


@pytest.fixture(scope="module")
def folder(make_llama):
    return str(make_llama("pooling_input")[0])


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, convert="embed", max_model_len=64, max_num_seqs=8) as llm:
        yield llm


def test_nothing_gives_nothing(llm):
    assert (
        llm.embed([])
        == llm.encode([], pooling_task="token_embed")
        == llm.score("a", [])
        == llm.rerank("a", [])
        == []
    )
    assert llm.embed(()) == llm.score([], []) == []


def test_one_and_many(llm):
    (text,) = llm.embed("abc", use_tqdm=False)
    (mapping,) = llm.embed({"prompt": "abc"}, use_tqdm=False)
    (ids,) = llm.embed({"prompt_token_ids": text.prompt_token_ids}, use_tqdm=False)
    listed = llm.embed(["abc", {"prompt": "abc"}], use_tqdm=False)
    # A tuple is a list of texts, and no pair: an embedding model reads none.
    tupled = llm.embed(("abc", "abc"), use_tqdm=False)
    for other in (mapping, ids, *listed, *tupled):
        np.testing.assert_allclose(other.outputs.data, text.outputs.data, atol=1e-6)
    assert len(tupled) == 2


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ("", "empty"),
        ({"prompt": ""}, "empty"),
        ({"prompt_token_ids": []}, "empty"),
        (["abc", ""], "prompt 1: .*empty"),
        (["abc", 7], "prompt 1: .*int"),
        (["abc", None], "prompt 1: .*NoneType"),
        (["abc", ["a", "b"]], "prompt 1: .*list"),
        (["abc", {"promt": "x"}], "prompt 1: .*promt"),
        (["abc", {"prompt_token_ids": [5, "6"]}], "prompt 1: "),
        ([{"prompt_token_ids": [5]}, {"prompt_token_ids": [272]}], "prompt 1: .*272.*vocabulary"),
        ([{"prompt_token_ids": [-1]}], "token id -1 is not in the vocabulary"),
        (
            ["abc", {"prompt_token_ids": [5, 2**70]}],
            f"prompt 1: token id {2**70} is not in the vocabulary",
        ),
        (["\ud800"], "surrogate"),
        (7, "not a int"),
        (None, "not a NoneType"),
        ([("a", "b", "c")], "a pair must be two texts"),
    ],
)
def test_bad_prompts(llm, prompts, words):
    with pytest.raises(RequestError, match=words):
        llm.embed(prompts)
    # It was the only thing wrong.
    assert llm.embed("abc", use_tqdm=False)[0].error is None


class TestLength:
    def test_too_long_without_truncation(self, llm):
        with pytest.raises(
            ContextLengthError,
            match=r"prompt 1: .*65 tokens; this model's maximum context length is 64 tokens "
            r"\(max_model_len\)\. .*truncate_prompt",
        ):
            llm.embed(["abc", "x" * 65])
        with pytest.raises(ContextLengthError, match="characters"):
            llm.embed("x" * 10_000_000)

    @pytest.mark.parametrize("length", [65, 10_000])
    def test_with_truncation(self, llm, length):
        whole, cut = llm.embed(["x" * 64, "x" * length], truncate_prompt_tokens=-1, use_tqdm=False)
        assert cut.prompt_token_ids == whole.prompt_token_ids
        assert (
            len(
                llm.embed("x" * length, truncate_prompt_tokens=5, use_tqdm=False)[
                    0
                ].prompt_token_ids
            )
            == 5
        )
        (ids,) = llm.embed(
            {"prompt_token_ids": [40] * length}, truncate_prompt_tokens=3, use_tqdm=False
        )
        assert ids.prompt_token_ids == [40] * 3

    @pytest.mark.parametrize("wish", [0, -2, 65, 1.5, "5", True])
    def test_of_what_is_no_length(self, llm, wish):
        with pytest.raises(
            RequestError, match="truncate_prompt_tokens must be -1 or an integer from 1 to 64"
        ) as raised:
            llm.embed("abc", truncate_prompt_tokens=wish)
        assert raised.value.param == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"task": "classify"}, "task"),
        ({"task": "embedd"}, "task"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 65}, "dimensions"),
        ({"dimensions": 8.0}, "dimensions"),
        ({"normalize": 1}, "normalize"),
        ({"use_activation": True}, "use_activation"),
        ({"step_tag_id": 3}, "step_tag_id"),
        ({"returned_token_ids": [1]}, "returned_token_ids"),
    ],
)
def test_bad_params(llm, params, param):
    with pytest.raises(RequestError) as raised:
        llm.encode("abc", PoolingParams(**params))
    assert raised.value.param == param


@pytest.mark.parametrize(
    "params", [7, "embed", [PoolingParams()], [PoolingParams(), None], {"task": "embed"}]
)
def test_what_is_no_params(llm, params):
    with pytest.raises(RequestError, match="give PoolingParams, or a list of 2 of them"):
        llm.embed(["abc", "def"], params)


@pytest.mark.parametrize(
    ("queries", "documents"),
    [
        (["a", "b"], ["c"]),
        (["a", "b"], ["c", "d", "e"]),
        ("a", [""]),
        ("", ["a"]),
        ("a", [7]),
        (7, ["a"]),
        ("a", None),
        ("a", [["b"]]),
    ],
)
def test_bad_pairs(llm, queries, documents):
    for call in (llm.score, llm.rerank):
        with pytest.raises(RequestError):
            call(queries, documents)


def test_one_document_may_be_given_alone(llm):
    (ranked,) = llm.rerank("abc", "abc", use_tqdm=False)
    assert (ranked.index, ranked.document) == (0, "abc")
    assert ranked.relevance_score == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("top_n", [0, -1, 1.0, True, "1"])
def test_bad_top_n(llm, top_n):
    with pytest.raises(RequestError, match="top_n must be an integer of at least 1"):
        llm.rerank("a", ["b"], top_n=top_n)


def test_a_bad_prompt_computes_nothing(folder, watch):
    with LLM(folder, convert="embed", plugins=[watch]) as llm:
        with pytest.raises(RequestError):
            llm.embed(["abc"] * 100 + [""])
        assert watch.num_tokens == 0 and not llm.engine.has_unfinished_requests()


class TestTask:
    def test_two_of_them(self, llm):
        tokens = PoolingParams(task="token_embed")
        for call in (llm.embed, llm.classify):
            with pytest.raises(RequestError, match="but params are for 'token_embed'") as raised:
                call("abc", tokens)
            assert raised.value.param == "task"
        with pytest.raises(
            RequestError, match="scores by the task 'embed', but params are for 'token_embed'"
        ):
            llm.score("abc", "abc", tokens)
        assert llm.encode("abc", tokens, pooling_task="token_embed", use_tqdm=False)[
            0
        ].outputs.data.shape == (3, 64)

    def test_none(self, llm):
        with pytest.raises(
            RequestError, match=r"no task is given\. This model serves: embed, token_embed"
        ):
            llm.encode("abc")

    def test_of_an_engine_that_generates(self, folder):
        with LLM(folder, max_model_len=64) as llm:
            embed = (
                r"Supported: generate\. Start the engine with "
                r"convert='embed'.* extra_tasks=.'embed'."
            )
            with pytest.raises(RequestError, match=embed):
                llm.embed("abc")
            with pytest.raises(RequestError, match=embed):
                llm.score("abc", "abc")
            with pytest.raises(RequestError, match=r"convert='classify'\.$"):
                llm.classify("abc")


@pytest.mark.parametrize("method", ["encode", "embed", "classify", "score", "rerank"])
def test_keywords_that_there_are_not(llm, method):
    call = getattr(llm, method)
    texts = ["abc"] * (1 + (method in ("score", "rerank")))
    with pytest.raises(
        TypeError,
        match=rf"^LLM\.{method}\(\) takes no 'dimensions'\. Give PoolingParams\(dimensions=8\)",
    ):
        call(*texts, dimensions=8)
    with pytest.raises(
        TypeError, match=rf"^LLM\.{method}\(\) takes no 'use_tqmd'\. Did you mean 'use_tqdm'"
    ):
        call(*texts, use_tqmd=False)


class TestStepBudget:
    def test_below_the_number_of_sequences(self, folder):
        """Nobody waits for a token in each step where prompts are pooled whole."""
        with LLM(folder, convert="embed", max_model_len=64, max_num_batched_tokens=16) as llm:
            assert (llm.config.scheduler.token_budget, llm.config.scheduler.max_num_seqs) == (
                64,
                256,
            )
            assert all(
                output.error is None
                for output in llm.embed(["x" * 60, "abc"] * 100, use_tqdm=False)
            )

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"enable_chunked_prefill": False},
            {"convert": "embed", "enable_chunked_prefill": True},
        ],
    )
    def test_where_sequences_share_it(self, folder, options):
        message = (
            r"max_num_batched_tokens \(16\) must be .* max_num_seqs \(256\).* raise it to 256, "
            r"or give max_num_seqs=16"
        )
        with pytest.raises(ConfigError, match=message):
            LLM(folder, max_model_len=64, max_num_batched_tokens=16, **options)
