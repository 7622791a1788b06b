import os
from multiprocessing import get_context

from vllm import LLM, EngineArgs, SamplingParams
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.network_utils import get_open_port


def create_parser():
    parser = FlexibleArgumentParser(description="Data parallel inference")
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="tiny", max_num_seqs=64, enable_expert_parallel=True)
    parser.add_argument("--dp-num-nodes", type=int, default=1)
    parser.add_argument("--dp-master-addr", type=str, default="127.0.0.1")
    parser.add_argument("--timeout", type=int, default=300)
    return parser


def main(dp_size, dp_rank, dp_master_ip, dp_master_port, engine_args):
    os.environ["VLLM_DP_RANK"] = str(dp_rank)
    os.environ["VLLM_DP_SIZE"] = str(dp_size)
    os.environ["VLLM_DP_MASTER_IP"] = dp_master_ip
    os.environ["VLLM_DP_MASTER_PORT"] = str(dp_master_port)
    prompts = ["Hello, my name is", "The old house", "The capital of France is", "One day"] * 4
    floor = len(prompts) // dp_size
    prompts = prompts[dp_rank * floor : (dp_rank + 1) * floor]
    print(f"DP rank {dp_rank} needs to process {len(prompts)} prompts", flush=True)
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=[16, 20][dp_rank % 2])
    llm = LLM(**engine_args)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs[:2]:
        print(f"DP rank {dp_rank}, Generated text: {output.outputs[0].text!r}", flush=True)


if __name__ == "__main__":
    args = vars(create_parser().parse_args())
    dp_size = args.pop("data_parallel_size") or 2
    args.pop("dp_num_nodes")
    dp_master_ip = args.pop("dp_master_addr")
    timeout = args.pop("timeout")
    dp_master_port = get_open_port()
    processes = get_context("spawn" if current_platform.is_rocm() else None)
    procs = []
    for rank in range(dp_size):
        proc = processes.Process(
            target=main, args=(dp_size, rank, dp_master_ip, dp_master_port, args)
        )
        proc.start()
        procs.append(proc)
    exit_code = 0
    for proc in procs:
        proc.join(timeout=timeout)
        exit_code = exit_code or proc.exitcode
    raise SystemExit(exit_code)
