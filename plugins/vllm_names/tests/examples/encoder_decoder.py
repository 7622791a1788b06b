import sys

from vllm import LLM, SamplingParams
from vllm.inputs import ExplicitEncoderDecoderPrompt, TextPrompt, TokensPrompt


def create_all_prompt_types(tokenizer):
    text_prompt = TextPrompt(prompt="the cat is on the roof")
    tokens_prompt = TokensPrompt(
        prompt_token_ids=tokenizer.encode("seven apples", add_special_tokens=True)
    )
    pair = ExplicitEncoderDecoderPrompt(
        encoder_prompt=text_prompt, decoder_prompt=TextPrompt(prompt="the")
    )
    return ["the weather is fine", text_prompt, tokens_prompt, pair]


def main():
    llm = LLM(model=sys.argv[1], dtype="float", enforce_eager=True)
    prompts = create_all_prompt_types(llm.llm_engine.get_tokenizer())
    sampling_params = SamplingParams(temperature=0, top_p=1.0, min_tokens=0, max_tokens=20)
    outputs = llm.generate(prompts, sampling_params)
    for i, output in enumerate(outputs):
        print(f"Encoder prompt: {output.encoder_prompt!r}")
        print(f"Decoder prompt: {output.prompt!r}")
        print(f"Output {i + 1}: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
