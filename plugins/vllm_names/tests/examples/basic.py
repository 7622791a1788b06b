from vllm import LLM, SamplingParams

prompts = ["My favourite animal is", "Once upon a time", "The sea was", "She opened the door and"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)


def main():
    llm = LLM(model="tiny")
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        print(f"Prompt: {output.prompt!r}")
        print(f"Output: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
