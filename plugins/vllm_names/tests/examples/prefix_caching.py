from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

prefix = (
    "There was a school at the edge of the forest, and its teacher knew the name of each bird. "
    "In the morning she opened the windows, "
    "and the children told her what they had heard on their way. One day she asked them to write "
    "it down. "
)
prompts = ["Tom wrote that", "Anna wrote that", "Nobody wrote that", "The teacher read that"]
generating_prompts = [prefix + prompt for prompt in prompts]
sampling_params = SamplingParams(temperature=0.0)


def main():
    regular_llm = LLM(model="tiny", enable_prefix_caching=False, gpu_memory_utilization=0.4)
    outputs = regular_llm.generate(generating_prompts, sampling_params)
    regular_texts = []
    for output in outputs:
        regular_texts.append(output.outputs[0].text)
        print(f"Prompt: {output.prompt!r}\nGenerated text: {output.outputs[0].text!r}")
    del regular_llm
    cleanup_dist_env_and_memory()

    prefix_cached_llm = LLM(model="tiny", enable_prefix_caching=True, gpu_memory_utilization=0.4)
    prefix_cached_llm.generate(generating_prompts[0], sampling_params)
    outputs = prefix_cached_llm.generate(generating_prompts, sampling_params)
    cached_texts = [output.outputs[0].text for output in outputs]
    same = all(regular_texts[i] == cached_texts[i] for i in range(len(prompts)))
    print(f"Generated answers are the same: {same}")
    print(f"Cached tokens: {sum(output.num_cached_tokens for output in outputs)}")


if __name__ == "__main__":
    main()
