import random

from vllm import LLM, SamplingParams

prompts = ["Hello, my name is", "The old house", "The capital of France is", "One day"]
SEED = 42


def generate():
    llm = LLM(model="tiny", seed=SEED)
    return llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95))


def main():
    for output, other in zip(generate(), generate(), strict=True):
        print(f"Prompt: {output.prompt!r}\nGenerated text: {output.outputs[0].text!r}")
        print(f"Same: {output.outputs[0].text == other.outputs[0].text}")
    print(f"A random number: {random.randint(0, 100)}")


if __name__ == "__main__":
    main()
