from argparse import Namespace

from vllm import LLM, EngineArgs, PoolingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse_args():
    parser = FlexibleArgumentParser()
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="tiny", runner="pooling", trust_remote_code=True)
    return parser.parse_args()


def main(args: Namespace):
    prompts = ["Follow the white rabbit.", "Sigue al conejo blanco.", "Folge dem Kaninchen."]
    llm = LLM(**vars(args))
    outputs = llm.embed(prompts, pooling_params=PoolingParams(dimensions=32))
    for prompt, output in zip(prompts, outputs, strict=True):
        embeds = output.outputs.embedding
        print(f"Prompt: {prompt!r}\nEmbeddings: {str(embeds[:4])[:-1]}, ...] (size={len(embeds)})")


if __name__ == "__main__":
    main(parse_args())
