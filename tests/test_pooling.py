"""Pooling of causal models through the whole engine: each method whole and in chunks, from the
prefix cache, alone and together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from toolkit_lm import LLM, PoolingParams
from toolkit_lm.errors import ConfigError, ContextLengthError, RequestError

GENERATOR = torch.Generator().manual_seed(1)
TAG = 7
PROMPTS = [
    torch.randint(3, 272, (length,), generator=GENERATOR).tolist()
    for length in (3, 70, 1, 17, 33, 70)
]
for prompt in PROMPTS:
    prompt[::5] = [TAG] * len(prompt[::5])
GIVEN = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
OPTIONS = {
    "device": "cpu",
    "num_kv_blocks": 128,
    "block_size": 4,
    "max_model_len": 128,
    "max_num_seqs": 4,
}
WHOLE: dict[str, Any] = {}
CHUNKED = {"enable_chunked_prefill": True, "max_num_batched_tokens": 16}
CACHED = {**CHUNKED, "enable_prefix_caching": True}


def weights(count: int) -> torch.Tensor:
    return torch.arange(1, count + 1, dtype=torch.float32)[:, None]


METHODS = {
    "CLS": lambda states: states[0],
    "LAST": lambda states: states[-1],
    "MEAN": lambda states: states.mean(0),
    "MAX": lambda states: states.amax(0),
    "WEIGHTED_MEAN": lambda states: (
        (states * weights(len(states))).sum(0) / weights(len(states)).sum()
    ),
    "MEAN_SQRT_LEN": lambda states: states.sum(0) / len(states) ** 0.5,
}


@pytest.fixture(scope="module")
def checkpoint(make_llama):
    return make_llama("pooling")


@pytest.fixture(scope="module")
def states(checkpoint):
    """The last hidden states [tokens, H] of each prompt."""
    with torch.inference_mode():
        return [
            checkpoint[1].model(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS
        ]


@pytest.fixture(scope="module")
def classifier(make_llama, tmp_path_factory):
    """A checkpoint with a trained score head of three labels, and transformers' logits [tokens, 3]
    of each prompt."""
    from toolkit_lm_devkit import make_checkpoint
    from transformers import LlamaForSequenceClassification

    config = make_llama("pooling")[1].config.to_dict() | {"num_labels": 3, "architectures": None}
    torch.manual_seed(1)
    model = LlamaForSequenceClassification(
        LlamaForSequenceClassification.config_class(**config)
    ).eval()
    folder = make_checkpoint(tmp_path_factory.mktemp("classifier"), model)
    with torch.inference_mode():
        return folder, [
            model.score(model.model(torch.tensor([prompt])).last_hidden_state[0])
            for prompt in PROMPTS
        ]


def llm_of(folder, **options):
    return LLM(str(folder), **OPTIONS, **options)


def same(outputs, expected, atol=2e-5):
    for output, values in zip(outputs, expected, strict=True):
        assert output.error is None
        np.testing.assert_allclose(output.outputs.data, values, atol=atol)


def unit(vector):
    return torch.nn.functional.normalize(vector, dim=-1)


class TestMethods:
    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize(
        "options", [WHOLE, CHUNKED, CACHED], ids=["whole", "chunked", "cached"]
    )
    def test_whole_chunked_and_cached(self, checkpoint, states, method, options):
        expected = [METHODS[method](one) for one in states]
        with llm_of(
            checkpoint[0], convert="embed", pooling_type=method, normalize=False, **options
        ) as llm:
            together = llm.encode(GIVEN, pooling_task="embed", use_tqdm=False)
            same(together, expected)
            again = [llm.encode(one, pooling_task="embed", use_tqdm=False)[0] for one in GIVEN]
            same(again, expected)
        # Only LAST can do without the hidden states of what is cached.
        reads = options is CACHED and method == "LAST"
        assert [one.num_cached_tokens for one in again] == [
            (len(prompt) - 1) // 4 * 4 if reads else 0 for prompt in PROMPTS
        ]

    @pytest.mark.parametrize(
        "options", [WHOLE, CHUNKED, CACHED], ids=["whole", "chunked", "cached"]
    )
    def test_all_tokens(self, checkpoint, states, options):
        with llm_of(checkpoint[0], convert="embed", **options) as llm:
            for _ in range(2):
                outputs = llm.encode(GIVEN, pooling_task="token_embed", use_tqdm=False)
                same(outputs, [unit(one) for one in states])
                assert not any(output.num_cached_tokens for output in outputs)

    @pytest.mark.parametrize(
        "options", [WHOLE, CHUNKED, CACHED], ids=["whole", "chunked", "cached"]
    )
    def test_steps(self, classifier, options):
        folder, logits = classifier
        params = PoolingParams(
            task="token_classify", step_tag_id=TAG, returned_token_ids=[2, 0], use_activation=False
        )
        with llm_of(folder, **options) as llm:
            for _ in range(2):
                outputs = llm.encode(GIVEN, params, use_tqdm=False)
                same(
                    outputs,
                    [
                        one[np.array(prompt) == TAG][:, [2, 0]]
                        for one, prompt in zip(logits, PROMPTS, strict=True)
                    ],
                )

    def test_what_a_token_task_leaves_in_the_cache_serves_last(self, checkpoint, states):
        with llm_of(checkpoint[0], convert="embed", **CACHED) as llm:
            llm.encode(GIVEN[1], pooling_task="token_embed", use_tqdm=False)
            (output,) = llm.encode(GIVEN[1], pooling_task="embed", use_tqdm=False)
            assert output.num_cached_tokens == 68
            same([output], [unit(states[1][-1])])


class TestTasks:
    @pytest.mark.parametrize(
        "options", [WHOLE, CHUNKED, CACHED], ids=["whole", "chunked", "cached"]
    )
    def test_tasks_of_an_embedder_in_one_batch(self, checkpoint, states, options):
        wishes = [
            PoolingParams(task="embed"),
            PoolingParams(task="token_embed", normalize=False),
            PoolingParams(task="embed", dimensions=5),
            PoolingParams(task="token_embed"),
            PoolingParams(task="embed", normalize=False),
            PoolingParams(task="token_embed", dimensions=3),
        ]
        expected = [
            unit(states[0][-1]),
            states[1],
            unit(states[2][-1, :5]),
            unit(states[3]),
            states[4][-1],
            unit(states[5][:, :3]),
        ]
        with llm_of(checkpoint[0], convert="embed", matryoshka=True, **options) as llm:
            same(llm.encode(GIVEN, wishes, use_tqdm=False), expected)
            same(
                [
                    llm.encode(one, wish, use_tqdm=False)[0]
                    for one, wish in zip(GIVEN, wishes, strict=True)
                ],
                expected,
            )

    @pytest.mark.parametrize(
        "options", [WHOLE, CHUNKED, CACHED], ids=["whole", "chunked", "cached"]
    )
    def test_tasks_of_a_classifier_in_one_batch(self, classifier, options):
        folder, logits = classifier
        tasks = ["classify", "token_classify"] * 3
        expected = [
            one[-1].softmax(-1) if task == "classify" else one.softmax(-1)
            for one, task in zip(logits, tasks, strict=True)
        ]
        with llm_of(folder, **options) as llm:
            same(
                llm.encode(GIVEN, [PoolingParams(task=task) for task in tasks], use_tqdm=False),
                expected,
            )
            for output, one in zip(llm.classify(GIVEN, use_tqdm=False), logits, strict=True):
                np.testing.assert_allclose(output.outputs.probs, one[-1].softmax(-1), atol=2e-5)

    def test_what_a_model_does_not_serve_lists_what_it_does(self, checkpoint, classifier):
        with llm_of(checkpoint[0], convert="embed") as llm:
            assert llm.engine.tasks == ("embed", "token_embed")
            for call in (
                lambda: llm.classify(GIVEN),
                lambda: llm.encode(GIVEN, pooling_task="token_classify"),
                lambda: llm.generate(GIVEN),
                lambda: llm.encode(GIVEN),
            ):
                with pytest.raises(RequestError, match="embed, token_embed") as raised:
                    call()
                assert raised.value.param == "task"
        with llm_of(classifier[0]) as llm:
            # Three labels are no score.
            assert llm.engine.tasks == ("classify", "token_classify")
            for call in (
                lambda: llm.embed(GIVEN),
                lambda: llm.score("a", "b"),
                lambda: llm.rerank("a", ["b"]),
            ):
                with pytest.raises(RequestError, match="classify, token_classify"):
                    call()
        with llm_of(checkpoint[0]) as llm:
            assert llm.engine.tasks == ("generate",)
            for call in (lambda: llm.embed(GIVEN), lambda: llm.score("a", "b")):
                with pytest.raises(RequestError, match="Supported: generate"):
                    call()


class TestMemory:
    def test_no_cache_where_each_prompt_is_computed_at_once(self, checkpoint):
        with llm_of(checkpoint[0], convert="embed") as llm:
            cache = llm.engine.client.core.kv_cache
            assert (cache.pools, cache.groups) == ([], [])
        for options in (CHUNKED, {"enable_prefix_caching": True}):
            with llm_of(checkpoint[0], convert="embed", **options) as llm:
                assert llm.engine.client.core.kv_cache.pools[0].num_blocks == 128

    def test_a_long_prompt_raises_the_budget(self, checkpoint, states):
        with llm_of(checkpoint[0], convert="embed", max_num_batched_tokens=16) as llm:
            assert llm.config.scheduler.max_num_batched_tokens == 128
            assert not llm.config.scheduler.enable_chunked_prefill
            same(
                llm.encode(GIVEN, pooling_task="embed", use_tqdm=False),
                [unit(one[-1]) for one in states],
            )

    def test_prompts_too_long_for_one_step_are_cut(self, make_llama):
        folder, model = make_llama("long", max_position_embeddings=10000)
        prompt = torch.randint(3, 272, (900,), generator=GENERATOR).tolist()
        with torch.inference_mode():
            mean = model.model(torch.tensor([prompt])).last_hidden_state[0].mean(0)
        with LLM(
            str(folder),
            device="cpu",
            convert="embed",
            pooling_type="MEAN",
            max_num_batched_tokens=256,
            num_kv_blocks=700,
        ) as llm:
            assert llm.config.max_model_len == 10000
            assert (
                llm.config.scheduler.enable_chunked_prefill,
                llm.config.scheduler.max_num_batched_tokens,
            ) == (True, 256)
            same(
                llm.encode({"prompt_token_ids": prompt}, pooling_task="embed", use_tqdm=False),
                [unit(mean)],
            )

    def test_few_blocks(self, checkpoint, states):
        """One prompt of 70 tokens takes 18 blocks of 32."""
        options = OPTIONS | {"num_kv_blocks": 32}
        for method in ("LAST", "MEAN"):
            with LLM(
                str(checkpoint[0]),
                convert="embed",
                pooling_type=method,
                normalize=False,
                **options,
                **CACHED,
            ) as llm:
                for _ in range(2):
                    outputs = llm.encode(GIVEN * 3, pooling_task="embed", use_tqdm=False)
                    same(outputs, [METHODS[method](one) for one in states] * 3)

    def test_tokens_over_the_limits(self, checkpoint):
        with llm_of(checkpoint[0], convert="embed") as llm:
            (longest,) = llm.embed({"prompt_token_ids": [5] * 128}, use_tqdm=False)
            assert longest.error is None
            with pytest.raises(
                ContextLengthError, match=r"129 tokens; .* maximum context length is 128 tokens"
            ):
                llm.embed({"prompt_token_ids": [5] * 129})
            (cut,) = llm.embed(
                {"prompt_token_ids": [*[5] * 128, 6]}, truncate_prompt_tokens=-1, use_tqdm=False
            )
            np.testing.assert_array_equal(cut.outputs.data, longest.outputs.data)
        with pytest.raises(
            ConfigError, match="runner 'pooling' cannot run 'LlamaForCausalLM' as it is"
        ):
            llm_of(checkpoint[0], runner="pooling", convert="none")


class TestFaults:
    @pytest.mark.parametrize(
        "options", [WHOLE, CHUNKED, CACHED], ids=["whole", "chunked", "cached"]
    )
    @pytest.mark.parametrize("overlap", [False, True])
    def test_a_request_on_which_the_model_fails(self, checkpoint, states, options, overlap, caplog):
        """It ends with an error; all others are computed again, and what their poolers had summed
        is not summed twice."""
        bad = {"prompt_token_ids": [*PROMPTS[1][:40], 5]}
        with llm_of(
            checkpoint[0], convert="embed", pooling_type="MEAN", overlap=overlap, **options
        ) as llm:
            pooler = llm.engine.client.core.executor.runner.model.pooler
            pool = pooler.forward

            def fails(hidden_states, meta):
                if any(row.finished and row.token_ids[-1] == 5 for row in meta.rows):
                    raise MemoryError("no more beads")
                return pool(hidden_states, meta)

            pooler.forward = fails
            *outputs, failed, last = llm.encode(
                [*GIVEN, bad, GIVEN[1]], pooling_task="embed", use_tqdm=False
            )
            assert failed.finish_reason == "error" and "no more beads" in failed.error
            same([*outputs, last], [unit(one.mean(0)) for one in [*states, states[1]]])
            same(
                llm.encode(GIVEN, pooling_task="embed", use_tqdm=False),
                [unit(one.mean(0)) for one in states],
            )
        assert "a step failed" in caplog.text
