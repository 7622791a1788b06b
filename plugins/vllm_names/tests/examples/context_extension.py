from vllm import LLM, RequestOutput, SamplingParams

rope_theta = 1000000
original_max_position_embeddings = 256
factor = 4.0
hf_overrides = {
    "rope_parameters": {
        "rope_theta": rope_theta,
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original_max_position_embeddings,
    },
    "max_position_embeddings": int(original_max_position_embeddings * factor),
}


def create_llm():
    return LLM(model="tiny", hf_overrides=hf_overrides, enforce_eager=True)


def run_llm_chat(llm) -> list[RequestOutput]:
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
    ]
    return llm.chat(conversation, SamplingParams(temperature=0.8, top_p=0.95), use_tqdm=False)


def main():
    llm = create_llm()
    print(f"max_model_len: {llm.llm_engine.model_config.max_model_len}")
    for output in run_llm_chat(llm):
        print(f"Generated text: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
