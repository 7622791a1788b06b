"""Measures a decode step outside the model: the plan, its inputs, the draw, results and text.

usage: python benchmarks/step_loop.py [--model tiny] [--rows 1,8,32] [--steps 200] [--temperature 0]
[--dtype bfloat16]

An engine in this process decodes. A line has medians in milliseconds: of a step, of what the model
computes in it (hidden states and logits), of the rest of the engine's step, and of the text that is
made of its tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import wraps
from statistics import median
from typing import Any

from toolkit_lm import LLM, SamplingParams
from toolkit_lm.engine import InProcessClient

WARMUP = 20


class Clock:
    """Seconds that wrapped functions took."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.is_running = False

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            if self.is_running:
                # Inside another one.
                return function(*args, **options)
            self.is_running = True
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds += time.perf_counter() - start
                self.is_running = False

        return timed

    def pop_ms(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return 1000 * seconds


def measure(
    model: str, rows: int, steps: int, temperature: float, dtype: str
) -> tuple[float, float, float, float]:
    params = SamplingParams(max_tokens=WARMUP + steps + 1, temperature=temperature, ignore_eos=True)
    with LLM(model, dtype=dtype, engine_process=False, max_model_len=2 * (WARMUP + steps)) as llm:
        client = llm.engine.client
        assert isinstance(client, InProcessClient)
        in_model = Clock()
        in_core = Clock()
        core: Any = client.core
        runner = core.executor.runner
        runner.model.forward = in_model.wrap(runner.model.forward)
        # With its mark, by which greedy rows need no logits.
        runner.model.compute_logits = wraps(runner.model.compute_logits)(
            in_model.wrap(runner.model.compute_logits)
        )
        runner.model.likeliest = in_model.wrap(runner.model.likeliest)
        core.step = in_core.wrap(core.step)
        for row in range(rows):
            llm.engine.add_request(str(row), "Once upon a time", params)
        found = []
        for number in range(WARMUP + steps):
            start = time.perf_counter()
            llm.engine.step()
            whole = 1000 * (time.perf_counter() - start)
            core = in_core.pop_ms()
            computed = in_model.pop_ms()
            if number >= WARMUP:
                found.append((whole, computed, core - computed, whole - core))
    whole, computed, outside, text = (median(column) for column in zip(*found, strict=True))
    return whole, computed, outside, text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    print(f"{'rows':>4} {'step':>8} {'model':>8} {'engine':>8} {'text':>8}  ms")
    for rows in map(int, args.rows.split(",")):
        figures = measure(args.model, rows, args.steps, args.temperature, args.dtype)
        print(f"{rows:>4}", *(f"{one:8.2f}" for one in figures))


if __name__ == "__main__":
    main()
