import os
import shutil
from pathlib import Path

from vllm import LLM, EngineArgs
from vllm.model_executor.model_loader import ShardedStateLoader
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse_args():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.add_argument("--output", "-o", required=True, type=str)
    patterns = {ShardedStateLoader.TP_ONLY_PATTERN, ShardedStateLoader.PP_AND_TP_PATTERN}
    parser.add_argument("--file-pattern", type=str, help=f"one of {patterns}")
    parser.add_argument("--max-file-size", type=int, default=5 * 1024**3)
    return parser.parse_args()


def main(args):
    engine_args = EngineArgs.from_cli_args(args)
    if engine_args.enable_lora:
        raise ValueError("adapters cannot be saved")
    model_path = engine_args.model
    if not Path(model_path).is_dir():
        raise ValueError("model path must be a local directory")
    llm = LLM.from_engine_args(engine_args)
    Path(args.output).mkdir(exist_ok=True)
    llm.llm_engine.engine_core.save_sharded_state(
        path=args.output, pattern=args.file_pattern, max_size=args.max_file_size
    )
    for file in os.listdir(model_path):
        if os.path.splitext(file)[1] not in (".bin", ".pt", ".safetensors"):
            if os.path.isdir(os.path.join(model_path, file)):
                shutil.copytree(os.path.join(model_path, file), os.path.join(args.output, file))
            else:
                shutil.copy(os.path.join(model_path, file), args.output)
    print(f"Files: {sorted(os.listdir(args.output))}")


if __name__ == "__main__":
    main(parse_args())
