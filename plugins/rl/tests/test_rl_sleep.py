"""Pauses and sleeps."""

from __future__ import annotations

import asyncio

import pytest
import torch
from toolkit_lm import LLM, AsyncLLM, SamplingParams
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm_rl.control import AsyncControl, Control
from toolkit_lm_rl.memory import storages

PROMPTS = ["Once upon a time", "The capital of France is"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True)


def tokens(llm):
    return [
        (output.outputs[0].token_ids, output.outputs[0].cumulative_logprob)
        for output in llm.generate(PROMPTS, GREEDY)
    ]


@pytest.mark.parametrize("kernels", ["cpu", "torch"])
@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_sleeps_and_wakes(level, kernels):
    with LLM("tiny", kernels=kernels) as llm:
        expected = tokens(llm)
        control = Control(llm)
        control.sleep(level)
        cache = llm.engine.client.core.executor.runner.kv_cache
        assert [pool.num_blocks for pool in cache.pools] == [1] * len(cache.pools)
        assert control.is_sleeping()
        with pytest.raises(RequestError, match=r"paused or asleep: resume\(\) or wake_up\(\)"):
            tokens(llm)
        if level == 2:
            model = llm.engine.client.core.executor.runner.model
            large = [memory for memory in storages(model).values() if memory.nbytes() > 2**16]
            assert large
            for memory in large:
                content = torch.empty(0, dtype=torch.uint8).set_(memory)
                assert not content[4096:-4096].any()
        assert not control.wake_up(["weights"])
        assert control.state().asleep == ["kv_cache", "scheduling"]
        assert control.wake_up(["kv_cache"])
        assert tokens(llm) == expected
        # An engine can sleep again.
        control.sleep(level)
        assert control.wake_up()
        assert tokens(llm) == expected


def test_values_that_are_wrong():
    with LLM("tiny") as llm:
        control = Control(llm)
        with pytest.raises(RequestError, match="level must be 0, 1 or 2, not 3"):
            control.sleep(3)
        with pytest.raises(RequestError, match="tags: 'kv' is none of weights, kv_cache, sched"):
            control.wake_up(["kv"])
        assert control.wake_up()
        control.pause()
        assert control.state().is_paused
        with pytest.raises(RequestError, match="paused or asleep"):
            tokens(llm)
        control.resume()
        control.sleep(0)
        assert control.state().asleep == ["scheduling"]
        assert control.wake_up(["scheduling"])
        assert tokens(llm)


async def running(llm, name, num_tokens=60):
    """Begins a request, and returns its task once it has some tokens."""
    begun = asyncio.Event()

    async def ask():
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        async for output in llm.generate(PROMPTS[0], params, name):
            if len(output.outputs[0].token_ids) > 2:
                begun.set()
        return output.outputs[0]

    task = asyncio.create_task(ask())
    await begun.wait()
    return task


@pytest.mark.anyio
@pytest.mark.parametrize("engine_process", [False, True])
async def test_requests_are_kept(engine_process):
    config = VllmConfig.make(model="tiny", engine_process=engine_process)
    async with AsyncLLM(config) as llm:
        control = AsyncControl(llm)
        expected = await (await running(llm, "alone"))
        for begin, end in (
            (lambda: control.pause("keep"), control.resume),
            (lambda: control.sleep(1, "keep"), control.wake_up),
            (lambda: control.sleep(2, "keep"), control.wake_up),
        ):
            task = await running(llm, "kept")
            await begin()
            state = await control.state()
            assert state.is_paused
            assert not task.done()
            later = asyncio.create_task(anext(llm.generate(PROMPTS[1], GREEDY, "later")))
            for _ in range(3):
                assert (await control.state()).is_paused
            assert not task.done()
            assert not later.done()
            await end()
            assert (await task).token_ids == expected.token_ids
            assert await later


@pytest.mark.anyio
async def test_requests_end_or_finish():
    async with AsyncLLM(VllmConfig.make(model="tiny", engine_process=False)) as llm:
        control = AsyncControl(llm)
        task = await running(llm, "aborted")
        await control.pause("abort")
        assert (await task).finish_reason == "abort"
        await control.resume()
        task = await running(llm, "waited for")
        await control.pause("wait")
        assert len((await task).token_ids) == 60
        assert (await control.state()).is_paused
        await control.resume()
        task = await running(llm, "asleep")
        await control.sleep(1)
        assert (await task).finish_reason == "abort"
        await control.wake_up()
        task = await running(llm, "awaited")
        await control.sleep(1, "wait")
        assert len((await task).token_ids) == 60
        await control.wake_up()
        assert len((await (await running(llm, "after"))).token_ids) == 60
