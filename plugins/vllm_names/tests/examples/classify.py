from argparse import Namespace

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse_args():
    parser = FlexibleArgumentParser()
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="tiny", runner="pooling", enforce_eager=True)
    return parser.parse_args()


def main(args: Namespace):
    prompts = ["A cat on the roof", "The weather is fine", "Seven apples"]
    llm = LLM(**vars(args))
    outputs = llm.classify(prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        probs = output.outputs.probs
        trimmed = (str(probs[:16])[:-1] + ", ...]") if len(probs) > 16 else probs
        print(f"Prompt: {prompt!r}\nClass Probabilities: {trimmed} (size={len(probs)})")


if __name__ == "__main__":
    main(parse_args())
