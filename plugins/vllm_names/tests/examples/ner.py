from argparse import Namespace

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse_args():
    parser = FlexibleArgumentParser()
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="tiny", runner="pooling", enforce_eager=True, trust_remote_code=True)
    return parser.parse_args()


def main(args: Namespace):
    prompts = ["the cat on the roof", "seven apples"]
    llm = LLM(**vars(args))
    tokenizer = llm.get_tokenizer()
    label_map = llm.llm_engine.vllm_config.model_config.hf_config.id2label
    outputs = llm.encode(prompts, pooling_task="token_classify")
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = output.outputs.data
        predictions = logits.argmax(dim=-1)
        tokens = tokenizer.convert_ids_to_tokens(output.prompt_token_ids)
        labels = [label_map[p.item()] for p in predictions]
        assert len(tokens) == len(predictions)
        print(f"Prompt: {prompt!r}")
        for token, label in zip(tokens, labels, strict=True):
            if token not in tokenizer.all_special_tokens:
                print(f"{token:15} -> {label}")


if __name__ == "__main__":
    main(parse_args())
