import sys

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.lora.request import LoRARequest


def create_test_prompts(
    lora_path: str,
) -> list[tuple[str, SamplingParams, LoRARequest | None]]:
    return [
        (
            "A robot may not injure a human being",
            SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=16),
            None,
        ),
        (
            "To be or not to be,",
            SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2, max_tokens=16),
            None,
        ),
        (
            "Where is the ship?",
            SamplingParams(temperature=0.0, max_tokens=16, stop_token_ids=[3]),
            LoRARequest("pirate-lora", 1, lora_path),
        ),
        (
            "Where is the ship?",
            SamplingParams(temperature=0.0, max_tokens=16, stop_token_ids=[3]),
            LoRARequest("pirate-lora2", 2, lora_path),
        ),
    ]


def process_requests(
    engine: LLMEngine, test_prompts: list[tuple[str, SamplingParams, LoRARequest | None]]
):
    request_id = 0
    while test_prompts or engine.has_unfinished_requests():
        if test_prompts:
            prompt, sampling_params, lora_request = test_prompts.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params, lora_request=lora_request)
            request_id += 1
        request_outputs: list[RequestOutput] = engine.step()
        for request_output in request_outputs:
            if request_output.finished:
                print(f"{request_output.request_id}: {request_output.outputs[0].text!r}")


def initialize_engine() -> LLMEngine:
    engine_args = EngineArgs(
        model="tiny",
        enable_lora=True,
        max_loras=1,
        max_lora_rank=64,
        max_cpu_loras=2,
        max_num_seqs=256,
    )
    return LLMEngine.from_engine_args(engine_args)


if __name__ == "__main__":
    process_requests(initialize_engine(), create_test_prompts(sys.argv[1]))
