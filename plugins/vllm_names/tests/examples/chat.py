from vllm import LLM, EngineArgs
from vllm.outputs import RequestOutput
from vllm.utils.argparse_utils import FlexibleArgumentParser


def create_parser():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="tiny")
    group = parser.add_argument_group("Sampling parameters")
    group.add_argument("--max-tokens", type=int)
    group.add_argument("--temperature", type=float)
    group.add_argument("--top-p", type=float)
    group.add_argument("--top-k", type=int)
    parser.add_argument("--chat-template-path", type=str)
    return parser


def print_outputs(outputs: list[RequestOutput], conversations: list):
    assert len(outputs) == len(conversations)
    for conversation, output in zip(conversations, outputs, strict=True):
        print(f"Prompt: {conversation[-1]!r}")
        print(f"Generated text: {output.outputs[0].text!r}")


def main(args: dict):
    max_tokens = args.pop("max_tokens")
    temperature = args.pop("temperature")
    top_p = args.pop("top_p")
    top_k = args.pop("top_k")
    chat_template_path = args.pop("chat_template_path")

    llm = LLM(**args)
    sampling_params = llm.get_default_sampling_params()
    if max_tokens is not None:
        sampling_params.max_tokens = max_tokens
    if temperature is not None:
        sampling_params.temperature = temperature
    if top_p is not None:
        sampling_params.top_p = top_p
    if top_k is not None:
        sampling_params.top_k = top_k

    conversation = [
        {"role": "system", "content": "You answer in one sentence."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! What would you like to know?"},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    print_outputs(llm.chat(conversation, sampling_params, use_tqdm=False), [conversation])

    conversations = [conversation for _ in range(10)]
    print_outputs(llm.chat(conversations, sampling_params, use_tqdm=True), conversations)

    if chat_template_path is not None:
        with open(chat_template_path) as file:
            chat_template = file.read()
        outputs = llm.chat(
            conversations, sampling_params, use_tqdm=False, chat_template=chat_template
        )
        print_outputs(outputs, conversations)


if __name__ == "__main__":
    main(vars(create_parser().parse_args()))
