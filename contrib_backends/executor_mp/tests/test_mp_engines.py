"""Tensor parallel inside of data parallel: two engines of two ranks."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest
from toolkit_lm import LLM, AsyncLLM, SamplingParams
from toolkit_lm.config import VllmConfig
from toolkit_lm_devkit.executor import write_llama

OPTIONS = {
    "device": "cpu",
    "block_size": 4,
    "max_model_len": 128,
    "num_kv_blocks": 128,
    "dtype": "float32",
}
PARAMS = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
PROMPTS = [
    {"prompt_token_ids": [(3 * k + number) % 250 + 3 for k in range(5 + number)]}
    for number in range(6)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(folder):
    with LLM(str(folder), engine_process=False, **OPTIONS) as llm:
        return [one.outputs[0].token_ids for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def ranks_of(engine: int) -> list[psutil.Process]:
    """The workers of an engine process, by rank."""
    found = [
        one for one in psutil.Process(engine).children() if "worker" in " ".join(one.cmdline())
    ]
    return sorted(found, key=lambda one: one.pid)


async def tokens(llm: AsyncLLM, number: int, seen: list[int]) -> list[int]:
    last = None
    async for output in llm.generate(PROMPTS[number], PARAMS, request_id=str(number)):
        seen[0] += 1
        last = output
    assert last is not None
    assert last.outputs[0].finish_reason == "length", last.error
    return last.outputs[0].token_ids


@pytest.mark.parametrize("is_killed", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_two_engines_of_two_ranks(folder, expected, is_killed):
    """A killed rank ends its engine. The other engine goes on with its requests, and no client
    notices."""
    config = VllmConfig.make(
        model=str(folder), data_parallel_size=2, tensor_parallel_size=2, **OPTIONS
    )

    async def body():
        async with AsyncLLM(config) as llm:
            seen = [0]
            asked = asyncio.gather(*(tokens(llm, number, seen) for number in range(len(PROMPTS))))
            while seen[0] < 12:
                await asyncio.sleep(0.01)
            assert all(one.num_requests for one in llm.engines), "both engines have work"
            pids = [one.pid for one in llm.engines]
            ranks = [ranks_of(pid) for pid in pids]
            assert [len(one) for one in ranks] == [2, 2]
            if is_killed:
                os.kill(ranks[1][0].pid, signal.SIGKILL)
            assert await asked == expected
            if is_killed:
                assert [one.status for one in llm.engines] == ["ready", "dead"]
                _, alive = psutil.wait_procs(ranks[1], 30)
                assert alive == []

    asyncio.run(asyncio.wait_for(body(), 200))
