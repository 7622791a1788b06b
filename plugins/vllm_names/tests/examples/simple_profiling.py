import sys

from vllm import LLM, SamplingParams

prompts = ["Hello, my name is", "The capital of France is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=3)


def main():
    llm = LLM(
        model="tiny",
        tensor_parallel_size=1,
        profiler_config={"profiler": "torch", "torch_profiler_dir": sys.argv[1]},
    )
    llm.start_profile()
    outputs = llm.generate(prompts, sampling_params)
    llm.stop_profile()
    for output in outputs:
        print(f"Prompt: {output.prompt!r}\nGenerated text: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
