"""Pooling through AsyncLLM, over an engine in a process of its own and in a thread: many callers,
aborts, full queues, broken weights."""

from __future__ import annotations

import asyncio
import copy
import random
import threading
import time

import numpy as np
import pytest
import torch
from toolkit_lm import LLM, AsyncLLM, PoolingParams, SamplingParams, VllmConfig
from toolkit_lm.errors import ContextLengthError, QueueFullError, RequestError
from toolkit_lm.events import LoadEvent
from toolkit_lm.plugin import hookimpl
from toolkit_lm_devkit import make_checkpoint

EMBED = PoolingParams()
TOKENS = PoolingParams(task="token_embed", normalize=False)
OPTIONS = {"max_model_len": 128, "max_num_seqs": 4, "num_kv_blocks": 64, "block_size": 4}
CHUNKED = {
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "max_num_batched_tokens": 16,
}
BROKEN = 77
GENERATOR = torch.Generator().manual_seed(4)
PROMPTS = [
    [*torch.randint(100, 272, (length,), generator=GENERATOR).tolist()]
    for length in (3, 70, 1, 33, 110)
]


def given(ids: list[int]) -> dict[str, list[int]]:
    return {"prompt_token_ids": ids}


@pytest.fixture(scope="module")
def folder(make_llama):
    return str(make_llama("pooling_async")[0])


@pytest.fixture(scope="module")
def states(make_llama):
    with torch.inference_mode():
        return [
            make_llama("pooling_async")[1].model(torch.tensor([prompt])).last_hidden_state[0]
            for prompt in PROMPTS
        ]


@pytest.fixture(scope="module")
def broken_folder(make_llama, tmp_path_factory):
    """A checkpoint in which one token's embedding is not a number."""
    model = copy.deepcopy(make_llama("pooling_async")[1])
    with torch.no_grad():
        model.model.embed_tokens.weight[BROKEN] = float("nan")
    return str(make_checkpoint(tmp_path_factory.mktemp("broken"), model))


@pytest.fixture(scope="module", params=["process", "thread"])
def engine(request, folder):
    """One engine for many tests; it is idle where its last load says so."""
    process = None if request.param == "process" else False
    engine = AsyncLLM(
        VllmConfig.make(
            model=folder, convert="embed", **OPTIONS, **CHUNKED, engine_process=process
        ),
        plugins=[Loads()],
    )
    yield engine
    engine.close()


class Loads:
    """A plugin that remembers the last load."""

    name = "loads"
    last: LoadEvent | None = None

    @hookimpl
    def toolkit_event(self, event):
        if isinstance(event, LoadEvent):
            Loads.last = event


async def idle(engine) -> None:
    """Waits until nothing is left of any request."""
    for _ in range(1500):
        load = Loads.last
        if not (
            load.num_used_blocks
            or load.num_running
            or load.num_waiting
            or engine.engine.has_unfinished_requests()
        ):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"something is left: {load}")


def run(body, seconds=60):
    return asyncio.run(asyncio.wait_for(body, seconds))


def expected(states, params):
    return [
        one if params is TOKENS else torch.nn.functional.normalize(one[-1], dim=0) for one in states
    ]


class TestMany:
    def test_at_once_as_alone(self, engine, states):
        async def body():
            jobs = [
                (number, params) for number in range(len(PROMPTS)) for params in (EMBED, TOKENS)
            ] * 4
            random.Random(0).shuffle(jobs)
            outputs = await asyncio.gather(
                *(engine.encode(given(PROMPTS[number]), params) for number, params in jobs)
            )
            for (number, params), output in zip(jobs, outputs, strict=True):
                np.testing.assert_allclose(
                    output.outputs.data, expected(states, params)[number], atol=2e-5
                )
                assert output.finish_reason == "stop" and output.prompt_token_ids == PROMPTS[number]
            assert await engine.encode_many([], EMBED) == []
            batch = await engine.encode_many([given(prompt) for prompt in PROMPTS] * 3, TOKENS)
            for output, values in zip(batch, expected(states, TOKENS) * 3, strict=True):
                np.testing.assert_allclose(output.outputs.data, values, atol=2e-5)
            await idle(engine)

        run(body())

    def test_event_loops_of_several_threads(self, engine):
        results = []

        def one():
            results.append(run(engine.encode(given(PROMPTS[1]), EMBED)).outputs.data)

        threads = [threading.Thread(target=one) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 4
        for other in results[1:]:
            np.testing.assert_allclose(other, results[0], atol=2e-5)

    def test_a_prefix_is_had_from_the_cache_until_it_is_reset(self, engine):
        async def body():
            async def cached(**options):
                return (
                    await engine.encode(given(PROMPTS[4][:41]), EMBED, **options)
                ).num_cached_tokens

            await engine.reset_prefix_cache()
            assert [await cached(), await cached(), await cached(cache_salt="mine")] == [0, 40, 0]

        run(body())


class TestEnds:
    def test_cancelled_at_any_moment(self, engine, states):
        async def one(number, rng):
            task = asyncio.create_task(
                engine.encode(given(PROMPTS[number]), EMBED, request_id=f"storm-{rng.random()}")
            )
            await asyncio.sleep(rng.random() * 0.03)
            if rng.random() < 0.6:
                task.cancel()
            (output,) = await asyncio.gather(task, return_exceptions=True)
            if not isinstance(output, asyncio.CancelledError):
                np.testing.assert_allclose(
                    output.outputs.data, expected(states, EMBED)[number], atol=2e-5
                )

        async def body():
            await engine.encode(given(PROMPTS[0]), EMBED)
            await asyncio.gather(
                *(one(number % len(PROMPTS), random.Random(number)) for number in range(60))
            )
            batch = asyncio.create_task(engine.encode_many([given(PROMPTS[4])] * 20, EMBED))
            await asyncio.sleep(0.01)
            batch.cancel()
            await asyncio.gather(batch, return_exceptions=True)
            await idle(engine)
            assert engine.engine.queue.num_requests == 0

        run(body())

    def test_one_id_for_two_prompts_spares_others(self, engine):
        async def body():
            others = asyncio.create_task(
                engine.encode_many([given(prompt) for prompt in PROMPTS] * 4, EMBED)
            )
            with pytest.raises(RequestError, match="'twice' is in use"):
                await engine.encode_many(
                    [given(PROMPTS[0])] * 2, EMBED, request_ids=["twice", "twice"]
                )
            assert all(output.error is None for output in await others)
            assert (await engine.encode(given(PROMPTS[0]), EMBED, request_id="twice")).error is None
            await idle(engine)

        run(body())

    def test_aborts_and_timeouts(self, engine):
        async def body():
            others = [
                asyncio.create_task(engine.encode(given(PROMPTS[4]), TOKENS)) for _ in range(20)
            ]
            mine = asyncio.create_task(engine.encode(given(PROMPTS[4]), TOKENS, request_id="mine"))
            late = asyncio.create_task(engine.encode(given(PROMPTS[4]), TOKENS, timeout=0.0001))
            await asyncio.sleep(0)
            await engine.abort("mine")
            aborted = await mine
            timed_out = await late
            assert (aborted.finish_reason, aborted.outputs.data) == ("abort", None)
            assert (timed_out.finish_reason, timed_out.outputs.data) == ("timeout", None)
            assert all(output.finish_reason == "stop" for output in await asyncio.gather(*others))
            await idle(engine)

        run(body())

    def test_a_full_queue_refuses(self, folder):
        async def body():
            config = VllmConfig.make(
                model=folder,
                convert="embed",
                max_queued_requests=3,
                engine_process=False,
                **OPTIONS,
            )
            async with AsyncLLM(config) as engine:
                await engine.wait_ready()
                calls = [engine.encode(given(PROMPTS[4]), EMBED) for _ in range(60)]
                results = await asyncio.gather(*calls, return_exceptions=True)
                refused = [result for result in results if isinstance(result, QueueFullError)]
                assert refused and all(1 <= one.retry_after <= 60 for one in refused)
                served = [result for result in results if not isinstance(result, QueueFullError)]
                assert served and all(output.finish_reason == "stop" for output in served)
                assert (await engine.encode(given(PROMPTS[0]), EMBED)).error is None

        run(body())

    def test_an_idle_engine_costs_nothing(self, engine):
        """Even where somebody listens to its events."""

        async def body():
            await engine.encode(given(PROMPTS[0]), EMBED)
            await idle(engine)
            before = time.process_time()
            await asyncio.sleep(1)
            assert time.process_time() - before < 0.1

        run(body())


class TestBadRequests:
    def test_they_raise_and_spare_others(self, engine):
        async def body():
            bad = [
                ("", EMBED, RequestError),
                (given([]), EMBED, RequestError),
                (given([272]), EMBED, RequestError),
                (given([5] * 129), EMBED, ContextLengthError),
                (7, EMBED, RequestError),
                ("abc", PoolingParams(task="classify"), RequestError),
                ("abc", PoolingParams(dimensions=65), RequestError),
                ("abc", PoolingParams(use_activation=True), RequestError),
            ]

            async def refused(prompt, params, error):
                with pytest.raises(error):
                    await engine.encode(prompt, params)

            good = [engine.encode(given(PROMPTS[4]), EMBED) for _ in range(3)]
            outputs = await asyncio.gather(*good, *(refused(*one) for one in bad))
            assert all(output.error is None for output in outputs[:3])
            with pytest.raises(RequestError, match="embed, token_embed"):
                async for _ in engine.generate("abc", SamplingParams()):
                    pass
            with pytest.raises(
                RequestError, match=r"no task is given\. This model serves: embed, token_embed"
            ):
                await engine.encode_many(["abc"])
            with pytest.raises(RequestError, match="but params are for 'token_embed'"):
                await engine.encode("abc", TOKENS, pooling_task="embed")
            for parameter in ("request_ids", "names"):
                with pytest.raises(RequestError, match=f"{parameter} has 1 entries for 2 prompts"):
                    await engine.encode_many(["a", "b"], EMBED, **{parameter: ["x"]})
            with pytest.raises(RequestError, match="a list of these, not a int"):
                await engine.encode_many(7, EMBED)
            # One text is one prompt, and so are a mapping and a pair.
            text = await engine.encode_many("abc", EMBED)
            tokens = await engine.encode_many(given(PROMPTS[0]), pooling_task="token_embed")
            assert [len(text), len(tokens), tokens[0].outputs.data.shape] == [1, 1, (3, 64)]
            with pytest.raises(RequestError, match="prompt 1"):
                await engine.encode_many([given([5]), given([272])], EMBED)
            assert engine.tasks == ("embed", "token_embed")
            await idle(engine)

        run(body())


class TestBrokenWeights:
    @pytest.mark.parametrize("options", [{}, CHUNKED])
    def test_an_error_for_that_request_only(self, broken_folder, states, options):
        wishes = [EMBED, TOKENS, EMBED, EMBED, TOKENS]
        prompts = [PROMPTS[0], PROMPTS[1], [BROKEN, 5], PROMPTS[3], [*PROMPTS[4][:100], BROKEN]]
        with LLM(broken_folder, convert="embed", **OPTIONS, **options) as llm:
            for _ in range(2):
                outputs = llm.encode([given(prompt) for prompt in prompts], wishes, use_tqdm=False)
                assert [output.finish_reason for output in outputs] == [
                    "stop",
                    "stop",
                    "error",
                    "stop",
                    "error",
                ]
                for number in (2, 4):
                    assert (
                        outputs[number].outputs.data is None
                        and "not finite" in outputs[number].error
                    )
                for number in (0, 1, 3):
                    np.testing.assert_allclose(
                        outputs[number].outputs.data,
                        expected(states, wishes[number])[number],
                        atol=2e-5,
                    )

    def test_a_document_that_cannot_be_scored_comes_last(self, broken_folder):
        with LLM(broken_folder, convert="embed", **OPTIONS) as llm:
            documents = ["some text", llm.engine.renderer.decode([BROKEN]), "abc"]
            ranked = llm.rerank("abc", documents, use_tqdm=False)
            assert [(one.index, one.error is None) for one in ranked[:2]] == [(2, True), (0, True)]
            assert (ranked[2].index, ranked[2].document) == (1, documents[1])
            assert np.isnan(ranked[2].relevance_score) and "not finite" in ranked[2].error
            assert [one.index for one in llm.rerank("abc", documents, top_n=1, use_tqdm=False)] == [
                2
            ]

    def test_over_the_process(self, broken_folder):
        async def body():
            async with AsyncLLM(
                VllmConfig.make(model=broken_folder, convert="embed", **OPTIONS)
            ) as engine:
                bad, good = await engine.encode_many([given([BROKEN]), given(PROMPTS[0])], EMBED)
                assert (bad.finish_reason, bad.outputs.data) == (
                    "error",
                    None,
                ) and "not finite" in bad.error
                assert good.error is None
                assert engine.health().status == "ready"

        run(body())
