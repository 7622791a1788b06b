from argparse import Namespace

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.print_utils import print_embeddings


def parse_args():
    parser = FlexibleArgumentParser()
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="tiny", runner="pooling", enforce_eager=True)
    return parser.parse_args()


def main(args: Namespace):
    prompts = ["A cat on the roof", "The weather is fine", "Seven apples"]
    llm = LLM(**vars(args))
    outputs = llm.embed(prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"Prompt: {prompt!r}")
        print_embeddings(output.outputs.embedding)


if __name__ == "__main__":
    main(parse_args())
