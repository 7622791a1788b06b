from argparse import Namespace

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse_args():
    parser = FlexibleArgumentParser()
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="tiny", runner="pooling", enforce_eager=True)
    return parser.parse_args()


def main(args: Namespace):
    query = "Which animal is on the roof?"
    documents = ["The weather is fine.", "A cat is on the roof."]
    llm = LLM(**vars(args))
    outputs = llm.score(query, documents)
    for document, output in zip(documents, outputs, strict=True):
        score = output.outputs.score
        print(f"Pair: {[query, document]!r}\nScore: {score}")


if __name__ == "__main__":
    main(parse_args())
