"""Decode and prefill of an 8B shape by one attention backend, as shares of what the card can do.

usage: python -m gpu_kit.speed [--quick] --attention sdpa [--kernels torch] [--graphs piecewise]
[--parts eager] [--host]

Weights are random, from a config.json alone. Each number is said as it is found. Decode is told as
a share of the copy bandwidth (bytes read and written), by the bytes that a step must read: weights,
keys and values. Prefill is told as a share of the matrix rate, by the products that the model must
compute. --quick runs it on a CPU, on two layers.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gpu_kit.limits import COPY, PRODUCT
from gpu_kit.report import MissedError, checking, die_with_the_kit
from gpu_kit.shape_8b import FULL, QUICK, ShapePlan

START = "start to the first token"
PREFILL = "prefill"
WARM_UP_STEPS = 3
PROFILED_STEPS = 4
HOST_STEPS = 20
MOST_FUNCTIONS = 30
"""Functions that a profile of the host names."""
MOST_TOLD = 8
"""Kernels that a profile names."""


def share_of(limit: str, rate: float) -> dict[str, float]:
    """Share of a limit that the kit's first process has measured; empty if it has not."""
    measured = float(os.environ.get(limit, "0"))
    return {"share": round(rate / measured, 4)} if measured else {}


class Bench:
    """An engine with the plan's shape."""

    def __init__(self, plan: ShapePlan, folder: Path, args: argparse.Namespace) -> None:
        from toolkit_lm import LLM

        self.plan = plan
        self.is_compiled = args.graphs != "none"
        # Batches that are measured alone: one more of each is captured before the first number.
        details = {
            "backend": args.parts,
            "cudagraph_mode": args.graphs,
            "cudagraph_capture_sizes": plan.rows,
        }
        compiled = (
            {"optimization_level": 1, "compilation_config": json.dumps(details)}
            if self.is_compiled
            else {}
        )
        blocks = {"num_kv_blocks": 64} if plan is QUICK else {}
        self.llm = LLM(
            str(plan.write(folder)),
            load_format="dummy",
            device=plan.device,
            dtype=plan.dtype,
            renderer="tokens",
            attention_backend=args.attention,
            kernels=args.kernels,
            max_model_len=plan.max_model_len,
            max_num_seqs=plan.rows[-1],
            max_num_batched_tokens=plan.budget,
            enable_prefix_caching=False,
            **compiled,
            **blocks,
        )
        self.engine: Any = self.llm.engine
        self._count = 0

    def add(self, rows: int, length: int, **params: Any) -> list[str]:
        """Adds prompts of random tokens. Returns their ids."""
        from toolkit_lm import SamplingParams

        names = []
        for row in range(rows):
            self._count += 1
            ids = [
                (self._count * 31 + place * 7 + row) % (self.plan.vocab_size - 10) + 10
                for place in range(length)
            ]
            names.append(str(self._count))
            given = {"temperature": 0, "max_tokens": 200, "ignore_eos": True, **params}
            self.engine.add_request(names[-1], {"prompt_token_ids": ids}, SamplingParams(**given))
        return names

    def until_first_tokens(self, names: list[str]) -> float:
        """Steps until each request has a token. Returns the seconds."""
        waiting = set(names)
        begun = time.perf_counter()
        while waiting:
            waiting -= {one.request_id for one in self.engine.step() if one.outputs[0].token_ids}
        return time.perf_counter() - begun

    def decode(self, rows: int, keys: int, found: dict[str, Any], **params: Any) -> None:
        """The median of some steps in which each row gets a token."""
        names = self.add(rows, keys, **params)
        self.until_first_tokens(names)
        times = []
        for _ in range(WARM_UP_STEPS + self.plan.steps):
            begun = time.perf_counter()
            told = self.engine.step()
            times.append(time.perf_counter() - begun)
            if len(told) != rows:
                raise MissedError(f"a step gave {len(told)} of {rows} rows a token")
        self.engine.abort(names)
        step = statistics.median(times[WARM_UP_STEPS:])
        rate = self.plan.decode_bytes(rows, keys + WARM_UP_STEPS + self.plan.steps / 2) / step
        found.update(
            step_ms=round(1000 * step, 3),
            tokens_per_second=round(rows / step, 1),
            **share_of(COPY, rate),
        )

    def profile(self, rows: int, keys: int, found: dict[str, Any]) -> None:
        """Milliseconds of a decode step's kernels on the device, and the longest of them: what is
        missing to the step's time is the host's."""
        names = self.add(rows, keys)
        self.until_first_tokens(names)
        for _ in range(WARM_UP_STEPS):
            self.engine.step()
        found.update(self._profiled(lambda: [self.engine.step() for _ in range(PROFILED_STEPS)]))
        self.engine.abort(names)

    def host(self, rows: int, keys: int, found: dict[str, Any]) -> None:
        """Microseconds of a decode step by function of Python, as cProfile counts them, the
        costliest first."""
        names = self.add(rows, keys)
        self.until_first_tokens(names)
        for _ in range(WARM_UP_STEPS):
            self.engine.step()
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(HOST_STEPS):
            self.engine.step()
        profile.disable()
        self.engine.abort(names)
        stats: Any = pstats.Stats(profile)
        costly = sorted(stats.stats.items(), key=lambda pair: pair[1][2], reverse=True)
        found["own_us"] = {
            f"{Path(file).name}:{line} {name} x{calls / HOST_STEPS:g}": round(
                1e6 * own / HOST_STEPS, 1
            )
            for (file, line, name), (_, calls, own, *_) in costly[:MOST_FUNCTIONS]
        }

    def _profiled(self, work: Callable[[], object]) -> dict[str, Any]:
        from torch.profiler import ProfilerActivity, profile

        is_card = self.plan.device == "cuda"
        kinds = [ProfilerActivity.CUDA] if is_card else [ProfilerActivity.CPU]
        with profile(activities=kinds) as profiler:
            work()
        field = "self_device_time_total" if is_card else "self_cpu_time_total"
        events = [(getattr(one, field), one) for one in profiler.key_averages()]
        events = sorted(
            (pair for pair in events if pair[0] > 0), key=lambda pair: pair[0], reverse=True
        )

        def ms(microseconds: float) -> float:
            return round(microseconds / PROFILED_STEPS / 1000, 4)

        return {
            "kernels_ms": ms(sum(time for time, _ in events)),
            "launches": round(sum(one.count for _, one in events) / PROFILED_STEPS, 1),
            "longest": {
                f"{one.key[:90]} x{one.count / PROFILED_STEPS:g}": ms(time)
                for time, one in events[:MOST_TOLD]
            },
        }

    def prefill(self, prompts: int, length: int, found: dict[str, Any]) -> None:
        """The better of two."""
        seconds = min(
            self.until_first_tokens(self.add(prompts, length, max_tokens=1)) for _ in range(2)
        )
        rate = self.plan.prefill_flops(prompts, length) / seconds
        found.update(
            tokens_per_second=round(prompts * length / seconds, 1), **share_of(PRODUCT, rate)
        )

    def graphs(self, found: dict[str, Any]) -> None:
        """Which steps graphs have run."""
        captured = getattr(self.engine.client.core.executor.runner.compiler, "graphs", None)
        if captured is None:
            found["mode"] = "none, the device has none"
            return
        found["mode"] = str(captured.mode)
        found["steps"] = {str(kind): count for kind, count in captured.num_replays.items()}


def measurements(bench: Bench) -> dict[str, Callable[[dict[str, Any]], None]]:
    """Measurements by name, the most telling first: late ones may be cut."""
    plan = bench.plan

    def decode(rows: int, keys: int, **params: Any) -> Callable[[dict[str, Any]], None]:
        return lambda found: bench.decode(rows, keys, found, **params)

    found = {plan.decode_name(rows, plan.short): decode(rows, plan.short) for rows in plan.rows}
    if bench.is_compiled:
        found["graphs"] = bench.graphs
    else:
        found[PREFILL] = lambda told: bench.prefill(plan.prompts, plan.length, told)
    most = plan.rows[-1]
    for rows in (1, most):
        found[f"kernels of {plan.decode_name(rows, plan.short)}"] = lambda told, rows=rows: (
            bench.profile(rows, plan.short, told)
        )
    found[f"sampled {plan.decode_name(most, plan.short)}"] = decode(
        most, plan.short, temperature=0.9, top_p=0.9, seed=1
    )
    found |= {plan.decode_name(rows, plan.long): decode(rows, plan.long) for rows in plan.rows}
    if not bench.is_compiled:
        found["prefill of one prompt in four chunks"] = lambda told: bench.prefill(
            1, 4 * plan.budget, told
        )
    return found


def measure(plan: ShapePlan, folder: Path, args: argparse.Namespace) -> None:
    import psutil

    bench = None
    with checking(START) as found:
        bench = Bench(plan, folder, args)
        bench.until_first_tokens(bench.add(1, 4, max_tokens=1))
        found["seconds_since_process_start"] = round(
            time.time() - psutil.Process().create_time(), 2
        )
    if bench is None:
        return
    first = plan.rows[0]
    works = {
        f"host of {plan.decode_name(first, plan.short)}": partial(bench.host, first, plan.short)
    }
    for name, work in (works if args.host else measurements(bench)).items():
        with checking(name) as found:
            work(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--kernels", default="torch")
    parser.add_argument("--graphs", default="none")
    parser.add_argument("--parts", default="eager")
    parser.add_argument(
        "--host", action="store_true", help="profile the host in decode steps, and nothing else"
    )
    args = parser.parse_args()
    die_with_the_kit()
    with tempfile.TemporaryDirectory() as folder:
        measure(QUICK if args.quick else FULL, Path(folder), args)


if __name__ == "__main__":
    main()
