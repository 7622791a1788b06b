import torch
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

logger = init_logger(__name__)


class OneToken:
    def __init__(self, target_token: int) -> None:
        self.target_token = target_token

    def __call__(
        self, prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor
    ) -> torch.Tensor:
        kept = logits[self.target_token].item()
        logits[:] = float("-inf")
        logits[self.target_token] = kept
        return logits


class WrappedPerReqLogitsProcessor(AdapterLogitsProcessor):
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        super().__init__(vllm_config, device, is_pin_memory)
        self.is_cpu = device.type == "cpu"

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        target_token = params.extra_args and params.extra_args.get("target_token")
        if not self.is_cpu or target_token is None:
            return None
        if not isinstance(target_token, int):
            logger.warning("target_token value %s is not int; not applying it", target_token)
            return None
        return OneToken(target_token)


prompts = ["Hello, my name is", "The old house", "The capital of France is", "One day"]
sampling_params_list = [
    SamplingParams(temperature=0.0, extra_args={"target_token": 128}),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, extra_args={"target_token": "no int"}),
    SamplingParams(temperature=0.0),
]


def main():
    llm = LLM(model="tiny", logits_processors=[WrappedPerReqLogitsProcessor])
    outputs = llm.generate(prompts, sampling_params_list)
    for output in outputs:
        print(f"Output: {sorted(set(output.outputs[0].token_ids))}")


if __name__ == "__main__":
    main()
