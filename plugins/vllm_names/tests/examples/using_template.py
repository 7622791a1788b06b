from argparse import Namespace
from pathlib import Path
from typing import Any

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse_args():
    parser = FlexibleArgumentParser()
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="tiny", runner="pooling", trust_remote_code=True)
    parser.add_argument("--template", required=True)
    return parser.parse_args()


def get_hf_overrides() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["yes"],
        "method": "no_post_processing",
    }


def main(args: Namespace):
    chat_template = Path(args.template).read_text()
    options = vars(args)
    del options["template"]
    options["hf_overrides"] = get_hf_overrides()
    llm = LLM(**options)
    query = "which animal is on the roof"
    documents = ["the cat is on the roof", "the weather is fine", "seven apples"]
    outputs = llm.score(query, documents, chat_template=chat_template)
    print([output.outputs.score for output in outputs])


if __name__ == "__main__":
    main(parse_args())
