"""A worker that hangs: the step watchdog sees it, and the stacks of the workers are in the log."""

from __future__ import annotations

import asyncio
import time

import pytest
from toolkit_lm import AsyncLLM, SamplingParams
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import EngineDeadError
from toolkit_lm_devkit.executor import write_llama


def test_a_hung_worker_is_told_with_its_stack(tmp_path, sabotage, capfd):
    folder = write_llama(tmp_path / "llama")
    sabotage(1, "step", "hang")
    config = VllmConfig.make(
        model=str(folder),
        tensor_parallel_size=2,
        device="cpu",
        block_size=4,
        max_model_len=64,
        num_kv_blocks=64,
        step_timeout=0.5,
        engine_process=True,
    )

    # Stacks of the rank that hangs, and of the one that waits for it.
    told = ("in strike", "in all_reduce")

    async def body():
        async with AsyncLLM(config) as llm:

            async def ask():
                params = SamplingParams(temperature=0, max_tokens=4)
                async for _ in llm.generate(
                    {"prompt_token_ids": [5] * 13}, params, request_id="hangs"
                ):
                    pass

            asked = asyncio.create_task(ask())
            end = time.monotonic() + 30
            while llm.health().status != "stalled" and time.monotonic() < end:
                await asyncio.sleep(0.05)
            assert llm.health().status == "stalled"
            written = ""
            while not all(one in written for one in told) and time.monotonic() < end:
                await asyncio.sleep(0.05)
                written += capfd.readouterr().err
            assert [one for one in told if one not in written] == []
        with pytest.raises(EngineDeadError):
            await asked

    asyncio.run(asyncio.wait_for(body(), 120))
