from pathlib import Path

import toolkit_lm_tiny
import transformers
from vllm import LLM

model_name = str(Path(toolkit_lm_tiny.__file__).parent / "checkpoint")
chats = [
    [{"role": "user", "content": "Tell me about the sea."}],
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "hi"}],
]


def main():
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_name)
    transformers_model = transformers.AutoModelForCausalLM.from_pretrained(model_name)
    embedding_layer = transformers_model.get_input_embeddings()
    llm = LLM(model=model_name, enable_prompt_embeds=True, max_model_len=512)

    token_ids = [
        tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).input_ids
        for chat in chats
    ]
    prompt_embeds = [embedding_layer(ids).squeeze(0) for ids in token_ids]
    single = llm.generate({"prompt_embeds": prompt_embeds[0]})
    print(f"Single: {single[0].outputs[0].text!r}")
    for output in llm.generate([{"prompt_embeds": embeds} for embeds in prompt_embeds]):
        print(f"Embeddings: {output.outputs[0].text!r}")
    for output in llm.generate([{"prompt_token_ids": ids[0].tolist()} for ids in token_ids]):
        print(f"Tokens: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
