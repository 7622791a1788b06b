from argparse import Namespace

from vllm import LLM, EngineArgs
from vllm.config import PoolerConfig
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse_args():
    parser = FlexibleArgumentParser()
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(
        model="tiny",
        pooler_config=PoolerConfig(task="token_embed"),
        runner="pooling",
        enforce_eager=True,
    )
    return parser.parse_args()


def main(args: Namespace):
    prompts = ["Hello, my name is", "The capital of France is"]
    llm = LLM(**vars(args))
    for prompt, output in zip(prompts, llm.embed(prompts), strict=True):
        print(f"Prompt: {prompt!r} | Embedding size: {len(output.outputs.embedding)}")
    outputs = llm.encode(prompts, pooling_task="token_embed")
    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"Prompt: {prompt!r} | Multi-vector shape: {tuple(output.outputs.data.shape)}")
    query = "What is the capital of France?"
    documents = ["The capital of Brazil is Brasilia.", "The capital of France is Paris."]
    for document, output in zip(documents, llm.score(query, documents), strict=True):
        print(f"Pair: {[query, document]!r}\nScore: {output.outputs.score}")


if __name__ == "__main__":
    main(parse_args())
