from vllm import LLM
from vllm.sampling_params import BeamSearchParams


def main():
    llm = LLM(model="tiny")
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    outputs = llm.beam_search([{"prompt": "Once upon a time"}, {"prompt": "The cat"}], params)
    for output in outputs:
        for sequence in output.sequences:
            print(f"Generated text: {sequence.text!r} ({sequence.cum_logprob:.3f})")


if __name__ == "__main__":
    main()
