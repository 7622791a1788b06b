from argparse import Namespace

from toolkit_lm_vllm_names import LLM, EngineArgs, FlexibleArgumentParser


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
        embeds = output.outputs.embedding
        trimmed = (str(embeds[:16])[:-1] + ", ...]") if len(embeds) > 16 else embeds
        print(f"Prompt: {prompt!r}\nEmbeddings: {trimmed} (size={len(embeds)})")


if __name__ == "__main__":
    main(parse_args())
