from vllm import LLM, EngineArgs
from vllm.config import ProfilerConfig
from vllm.utils.argparse_utils import FlexibleArgumentParser

NUM_TOKENS = 8
ITERATIONS = {"prefill": (0, 1), "decode": (1, NUM_TOKENS), "both": (0, 0)}


def create_parser() -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="tiny")
    group = parser.add_argument_group("Batch parameters")
    group.add_argument("--batch-size", type=int, default=1)
    group.add_argument("--prompt-size", type=int, default=64)
    group.add_argument("--profile", choices=["none", *ITERATIONS], default="none")
    group.add_argument("--profile-dir", default="")
    return parser


def main(args: dict) -> None:
    batch_size = args.pop("batch_size")
    prompt_size = args.pop("prompt_size")
    profile = args.pop("profile")
    profile_dir = args.pop("profile_dir")
    if profile != "none":
        delay, most = ITERATIONS[profile]
        args["profiler_config"] = ProfilerConfig(
            profiler="torch",
            torch_profiler_dir=profile_dir,
            delay_iterations=delay,
            max_iterations=most,
        )
    llm = LLM(**args)
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = NUM_TOKENS
    sampling_params.min_tokens = NUM_TOKENS
    sampling_params.ignore_eos = True
    prompts = [("Once upon a time " * prompt_size)[:prompt_size]] * batch_size
    if profile != "none":
        llm.start_profile()
    outputs = llm.generate(prompts, sampling_params)
    if profile != "none":
        llm.stop_profile()
    for output in outputs:
        print(f"Prompt: {output.prompt!r}\nGenerated text: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main(vars(create_parser().parse_args()))
