from argparse import Namespace

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.print_utils import print_embeddings


def parse_args():
    parser = FlexibleArgumentParser()
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(
        model="tiny",
        runner="pooling",
        enforce_eager=True,
        max_model_len=1024,
        trust_remote_code=True,
    )
    return parser.parse_args()


def main(args: Namespace):
    prompts = ["A cat on the roof", "The weather is fine", "Seven apples"]
    llm = LLM(**vars(args))
    outputs = llm.encode(prompts, pooling_task="classify")
    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"Prompt: {prompt!r}")
        print_embeddings(output.outputs.data.tolist(), prefix="Reward")


if __name__ == "__main__":
    main(parse_args())
