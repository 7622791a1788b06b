import gc
import sys

import torch
from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.lora.request import LoRARequest


def create_test_prompts(
    lora_path: str,
) -> list[tuple[str, SamplingParams, LoRARequest | None]]:
    sampling_params = SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=16)
    return [
        ("my name is", sampling_params, None),
        ("my name is", sampling_params, LoRARequest("lora-test-1", 1, lora_path)),
        ("my name is", sampling_params, LoRARequest("lora-test-2", 1, lora_path)),
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
                print(f"Prompt: {request_output.prompt}")
                print(f"Output: {request_output.outputs[0].text!r}")


def initialize_engine(model: str, quantization: str | None) -> LLMEngine:
    engine_args = EngineArgs(
        model=model,
        quantization=quantization,
        enable_lora=True,
        max_lora_rank=64,
        max_loras=4,
    )
    return LLMEngine.from_engine_args(engine_args)


def main():
    for quantization in (None, "int8"):
        print(f"~~~~ Running with quantization {quantization} ~~~~")
        engine = initialize_engine("tiny", quantization)
        process_requests(engine, create_test_prompts(sys.argv[1]))
        del engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
