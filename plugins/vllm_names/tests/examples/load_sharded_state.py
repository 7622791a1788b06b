from vllm import LLM, EngineArgs, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse_args():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(load_format="sharded_state")
    parser.add_argument("--prompt", type=str, default="Once upon a time")
    parser.add_argument("--max-tokens", type=int, default=16)
    return parser.parse_args()


def main():
    args = parse_args()
    engine_args = EngineArgs.from_cli_args(args)
    sampling_params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    llm = LLM.from_engine_args(engine_args)
    for output in llm.generate(args.prompt, sampling_params):
        print(f"Generated text: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
