from argparse import Namespace

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse_args():
    parser = FlexibleArgumentParser()
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="tiny", runner="pooling", trust_remote_code=True)
    return parser.parse_args()


def main(args: Namespace):
    prompts = ["The sun is warm.", "Le soleil est chaud.", "Die Sonne ist warm.", "太阳很温暖。"]
    llm = LLM(**vars(args))
    outputs = llm.embed(prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        embeds = output.outputs.embedding
        trimmed = (str(embeds[:16])[:-1] + ", ...]") if len(embeds) > 16 else embeds
        print(f"Prompt: {prompt!r}\nEmbeddings for text matching: {trimmed} (size={len(embeds)})")


if __name__ == "__main__":
    main(parse_args())
