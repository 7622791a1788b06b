import asyncio
import itertools
import time

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

PAUSE_DURATION = 0.3


async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="tiny", enforce_eager=True))
    sampling_params = SamplingParams(max_tokens=30, ignore_eos=True)
    token_times: list[float] = []

    async def generate():
        outputs = []
        async for output in engine.generate(
            request_id="a story", prompt="Once upon a time", sampling_params=sampling_params
        ):
            outputs.append(output)
            token_times.append(time.monotonic())
        return outputs[-1]

    async def control():
        while len(token_times) < 5:
            await asyncio.sleep(0.001)
        await engine.pause_generation(mode="keep")
        before = len(token_times)
        await asyncio.sleep(PAUSE_DURATION)
        await engine.resume_generation()
        return before

    output, before = await asyncio.gather(generate(), control())
    assert output.finished
    print(f"Tokens: {len(output.outputs[0].token_ids)}")
    # Tokens of steps before the pause may still be on their way when it is reached.
    after = token_times[before - 1 :]
    if len(after) > 1:
        gap = max(later - earlier for earlier, later in itertools.pairwise(after))
        print(f"Paused: {gap >= PAUSE_DURATION * 0.9}")
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
