"""What ranks cost: tensor, pipeline and data parallel against one worker, sums between ranks, and the broadcast of plans.

usage: python benchmarks/ranks.py [--runs 3] [--model FOLDER] [--only W1,W3,sums,broadcast] [--quick]

    W1          32 x (128 in, 64 out)   tokens a second: those that are drawn
    W3          8 x (1024 in, 1 out)    tokens a second: those of the prompts
    sums        microseconds that two ranks take to add a tensor of [rows, 768] in bfloat16, over shared memory and over gloo
    broadcast   milliseconds that a plan of 32 rows takes to two processes, and the answer of one of them back

The systems are engines of the 160M shape that all live at the same time, and have their turns one by one. All of them have the same cores:
one worker computes in as many threads as there are cores, two ranks or engines in half of them each. A ratio is against one worker, the
median over the runs of the ratio within a run. `plain` is one worker whose layers are not computed by one kernel each, as those of ranks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import tempfile
import time
from pathlib import Path

from checkpoints import VOCAB_SIZE, make_llama_160m

SYSTEMS = {
    "one worker": {},
    "plain": {"kernels": "torch"},
    "TP 2": {"tensor_parallel_size": 2},
    "PP 2": {"pipeline_parallel_size": 2},
    "DP 2": {"data_parallel_size": 2},
}
GOALS = {"TP 2": 0.8, "PP 2": 0.85, "DP 2": 0.95}
WORKS = {"W1": (32, 128, 64), "W3": (8, 1024, 1)}
QUICK = {"W1": (8, 32, 16), "W3": (2, 256, 1)}
ROWS = (1, 8, 32, 128, 512)
HIDDEN = 768


def seconds(llm, work: tuple[int, int, int], seed: int) -> float:
    from toolkit_lm import SamplingParams

    number, length, new = work
    rng = random.Random(seed)
    prompts = [{"prompt_token_ids": [rng.randrange(10, VOCAB_SIZE) for _ in range(length)]} for _ in range(number)]
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    taken = time.perf_counter() - start
    assert [len(one.outputs[0].token_ids) for one in outputs] == [new] * number
    return taken


def race(model: Path, names: list[str], works: dict[str, tuple[int, int, int]], runs: int) -> None:
    from toolkit_lm import LLM

    systems = {}
    try:
        for name, options in SYSTEMS.items():
            start = time.perf_counter()
            systems[name] = LLM(str(model), max_model_len=2048, max_num_seqs=32, num_kv_blocks=1024, engine_process=True, **options)
            seconds(systems[name], (4, 64, 4), 0)
            print(f"{name} was ready after {time.perf_counter() - start:.0f} s", flush=True)
        print(f"{'':12}{'':>12}{'tokens/s':>10}{'ratio':>8}{'from':>8}{'to':>8}{'goal':>8}", flush=True)
        for name in names:
            number, length, new = works[name]
            tokens = number * (length if new == 1 else new)
            taken = {system: [seconds(llm, works[name], 100)] for system, llm in systems.items()}
            for run in range(runs):
                for system, llm in systems.items():
                    taken[system].append(seconds(llm, works[name], run))
            for system in systems:
                # The first run of each is not counted.
                ratios = [one / other for one, other in zip(taken["one worker"][1:], taken[system][1:], strict=True)]
                rate, goal = tokens / statistics.median(taken[system][1:]), GOALS.get(system, "")
                numbers = f"{rate:>10.0f}{statistics.median(ratios):>8.2f}{min(ratios):>8.2f}{max(ratios):>8.2f}"
                print(f"{name:12}{system:>12}{numbers}{goal:>8}", flush=True)
    finally:
        for llm in systems.values():
            llm.shutdown()


def percentiles(values: list[float]) -> tuple[float, float]:
    """The median, and the 99th percentile."""
    return statistics.median(values), statistics.quantiles(values, n=100, method="inclusive")[98]


def rank_main(rank: int, path: Path, times: int, results) -> None:
    import torch
    from toolkit_lm.config import VllmConfig
    from toolkit_lm_executor_mp import groups
    from toolkit_lm_executor_mp.torch_group import TorchGroup

    torch.set_num_threads(1)
    parallel = VllmConfig.default(tensor_parallel_size=2).with_rank(rank).parallel
    made = groups.connect(parallel, path, torch.device("cpu"))
    group, found = made.tensor, {}
    ways = {"memory": group.all_reduce, "gloo": lambda tensor: TorchGroup.all_reduce(group, tensor)}
    for rows in ROWS:
        tensor = torch.ones(rows, HIDDEN, dtype=torch.bfloat16)
        for way, add in ways.items():
            taken = []
            for _ in range(times):
                start = time.perf_counter()
                add(tensor.zero_())
                taken.append(1e6 * (time.perf_counter() - start))
            found[rows, way] = percentiles(taken[times // 10 :])
    made.close()
    if rank == 0:
        results.put((type(group).__name__, found))


def sums(folder: Path, times: int) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=rank_main, args=(rank, folder / "meeting", times, results)) for rank in range(2)]
    for process in processes:
        process.start()
    kind, found = results.get(timeout=300)
    for process in processes:
        process.join()
    print(f"sums of two ranks ({kind}), microseconds:")
    print(f"{'rows':>12}{'memory':>10}{'p99':>8}{'gloo':>10}{'p99':>8}")
    for rows in ROWS:
        (memory, memory_99), (gloo, gloo_99) = found[rows, "memory"], found[rows, "gloo"]
        print(f"{rows:>12}{memory:>10.1f}{memory_99:>8.0f}{gloo:>10.1f}{gloo_99:>8.0f}")


def receiver_main(rank: int, folder: str) -> None:
    import zmq
    from toolkit_lm.messages import StepResult
    from toolkit_lm_executor_mp import wire

    context = zmq.Context()
    commands, reports = wire.make_socket(context, zmq.PULL), wire.make_socket(context, zmq.PUSH)
    commands.bind(f"ipc://{folder}/{rank}")
    reports.connect(f"ipc://{folder}/reports")
    reports.send(b"ready")
    while True:
        wire.decode_command(commands.recv(copy=False).buffer)
        if rank == 0:
            reports.send(wire.encode(wire.Done(rank, 1, StepResult(token_ids=[[7]] * 32))))


def broadcast(times: int) -> None:
    """The plan is that of an engine that decodes 32 rows."""
    import zmq
    from toolkit_lm import LLM, SamplingParams
    from toolkit_lm_executor_mp import wire

    with LLM("tiny", engine_process=False, max_num_seqs=32) as llm:
        executor, plans = llm.engine.client.core.executor, []
        execute = executor.execute
        executor.execute = lambda plan: (plans.append(plan), execute(plan))[1]
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        llm.generate([f"Once upon a time {number}" for number in range(32)], params, use_tqdm=False)
    # The last one that all rows are in; those of no rows end an engine's work.
    plan = [plan for plan in plans if len(plan.scheduled) == 32 and not plan.new][-1]
    context, multi = zmq.Context(), multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        reports = wire.make_socket(context, zmq.PULL)
        reports.bind(f"ipc://{folder}/reports")
        commands = [wire.make_socket(context, zmq.PUSH) for _ in range(2)]
        processes = [multi.Process(target=receiver_main, args=(rank, folder)) for rank in range(2)]
        for rank, process in enumerate(processes):
            process.start()
            commands[rank].connect(f"ipc://{folder}/{rank}")
        for _ in processes:
            reports.recv()
        taken, size = [], 0
        for _ in range(times):
            start = time.perf_counter()
            message = wire.encode(wire.Step(plan))
            for one in commands:
                one.send(message)
            wire.decode_report(reports.recv())
            taken.append(1e3 * (time.perf_counter() - start))
            size = len(message)
            # As a step does between two plans.
            time.sleep(0.001)
        for process in processes:
            process.kill()
            process.join()
    context.destroy(linger=0)
    median, p99 = percentiles(taken[times // 10 :])
    print(f"broadcast of a plan of 32 rows ({size} bytes) and its answer: {median:.3f} ms, p99 {p99:.3f} ms (goal 1.0)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model", type=Path, help="a checkpoint of the 160M shape; default: made now")
    parser.add_argument("--only", default="W1,W3,sums,broadcast")
    parser.add_argument("--quick", action="store_true", help="little work, one run: to see that it works")
    args = parser.parse_args()
    only, times = args.only.split(","), 200 if args.quick else 2000
    with tempfile.TemporaryDirectory() as folder:
        if "broadcast" in only:
            broadcast(times)
        if "sums" in only:
            sums(Path(folder), times)
        if names := [name for name in WORKS if name in only]:
            model = make_llama_160m(args.model or Path(folder, "model"))
            race(model, names, QUICK if args.quick else WORKS, 1 if args.quick else args.runs)


if __name__ == "__main__":
    main()
