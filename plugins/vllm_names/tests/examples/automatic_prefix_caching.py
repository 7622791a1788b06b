import time

from vllm import LLM, SamplingParams

TABLE = "Ada lives in Oslo. Ben lives in Rome. Cleo lives in Lima. " * 6


def get_generation_time(llm, sampling_params, prompts):
    start = time.time()
    output = llm.generate(prompts, sampling_params=sampling_params)
    end = time.time()
    print(f"Output: {output[0].outputs[0].text}")
    print(f"Cached: {output[0].num_cached_tokens}")
    print(f"Generation time: {end - start} seconds.")


def main():
    llm = LLM(model="tiny", enable_prefix_caching=True)
    sampling_params = SamplingParams(temperature=0, max_tokens=20)
    get_generation_time(llm, sampling_params, TABLE + "Question: where does Ada live?")
    get_generation_time(llm, sampling_params, TABLE + "Question: where does Ben live?")


if __name__ == "__main__":
    main()
