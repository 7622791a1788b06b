from vllm import LLM, SamplingParams

PROMPT = "Once upon a time"


def run_normal_generation(llm: LLM) -> list[int]:
    sampling_params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1)
    result = llm.generate([PROMPT], sampling_params=sampling_params)[0].outputs[0]
    print(f"Tokens: {list(result.token_ids)}")
    return list(result.token_ids)


def run_trace_replay(llm: LLM, decode_token_ids: list[int]) -> None:
    sampling_params = SamplingParams(trace_decode_token_ids=decode_token_ids, logprobs=5)
    result = llm.generate([PROMPT], sampling_params=sampling_params)[0].outputs[0]
    assert list(result.token_ids) == decode_token_ids
    for token_id, found in zip(result.token_ids, result.logprobs, strict=True):
        known = found[token_id]
        print(f"token_id={token_id} logprob={known.logprob:.4f} rank={known.rank}")


def main() -> None:
    llm = LLM(model="tiny", enforce_eager=True, enable_trace_replay=True)
    decode_token_ids = run_normal_generation(llm)
    run_trace_replay(llm, decode_token_ids)
    run_trace_replay(llm, decode_token_ids[::-1])


if __name__ == "__main__":
    main()
