import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


async def stream_response(engine: AsyncLLM, prompt: str, request_id: str) -> None:
    print(f"\nPrompt: {prompt!r}\nResponse: ", end="", flush=True)
    sampling_params = SamplingParams(
        max_tokens=100, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA
    )
    async for output in engine.generate(
        request_id=request_id, prompt=prompt, sampling_params=sampling_params
    ):
        for completion in output.outputs:
            new_text = completion.text
            if new_text:
                print(new_text, end="", flush=True)
        if output.finished:
            print("\nGeneration complete!")
            break


async def main():
    engine_args = AsyncEngineArgs(model="tiny", enforce_eager=True)
    engine = AsyncLLM.from_engine_args(engine_args)
    try:
        prompts = ["The future of the village", "In a land far away", "The key to the garden"]
        for i, prompt in enumerate(prompts, 1):
            await stream_response(engine, prompt, f"stream-example-{i}")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
