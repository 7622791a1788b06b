"""Counts what speculative decoding costs beside the model, in figures that do not depend on the
machine: Python calls of a step, and passes of a draft model.

usage: python benchmarks/draft_calls.py [--rows 1,8,64] [--verbose]

The embedded model `tiny` decodes in this process, steps are not planned ahead, and calls of Python
and C functions are counted over 16 steps, as many as a block has tokens.

- rest: a step that asks no drafter, beside one of an engine without drafters; and the passes of the
  drafter in a prompt of 40 tokens and in these steps.
- drafted: a step of R rows that verifies 4 drafts each and asks for as many, beside a step of 5 R
  rows without drafts. `--verbose`: the functions that make the difference.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from speculation import DRAFTS, PASSES, SCRIPT, Plugin, count_passes, prompts
from toolkit_lm import LLM, SamplingParams

STEPS = 16
WARMUP = 8
RESTING = {
    "none": {},
    "ngram": {"drafter": "ngram"},
    "suffix": {"drafter": "suffix"},
    "draft_model": {"drafter": "draft_model", "plugin_option": ["drafters.model=tiny-draft"]},
    "eagle": {"drafter": "eagle", "plugin_option": ["drafters.model=tiny-eagle"]},
}
"""Options of engines, by drafter."""
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "T 1": {"temperature": 1.0, "seed": 3},
    "penalties": {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.2},
}


@contextmanager
def engine(rows: int, **options: Any) -> Iterator[LLM]:
    with LLM(
        "tiny",
        max_model_len=512,
        max_num_seqs=max(rows, 4),
        kv_cache_memory="1GiB",
        overlap=False,
        enable_prefix_caching=False,
        **options,
    ) as llm:
        yield llm


def add(llm: LLM, given: list[list[int]], **fields: Any) -> None:
    params = SamplingParams(
        **{"temperature": 0, "max_tokens": 300, "ignore_eos": True, "detokenize": False} | fields
    )
    for row, prompt in enumerate(given):
        llm.engine.add_request(str(row), {"prompt_token_ids": prompt}, params)


def end(llm: LLM, rows: int) -> None:
    llm.engine.abort([str(row) for row in range(rows)])
    while llm.engine.has_unfinished_requests():
        llm.engine.step()


def count(llm: LLM) -> Counter[str]:
    """Calls of STEPS steps, by function."""
    calls: Counter[str] = Counter()

    def see(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            calls[f"{code.co_filename.rpartition('/')[2]}:{code.co_qualname}"] += 1
        elif event == "c_call":
            calls[f"C: {getattr(argument, '__qualname__', argument)}"] += 1

    sys.setprofile(see)
    try:
        for _ in range(STEPS):
            llm.engine.step()
    finally:
        sys.setprofile(None)
    return calls


def show(calls: Counter[str], than: Counter[str]) -> None:
    """Functions with the greatest differences, per step."""
    more = {name: calls[name] - than[name] for name in calls | than}
    for name, difference in sorted(more.items(), key=lambda item: -abs(item[1]))[:40]:
        print(f"    {difference / STEPS:+8.1f}  {name}")


def rest(rows: int, verbose: bool) -> None:
    plain: Counter[str] = Counter()
    for name, options in RESTING.items():
        with engine(rows, **options) as llm:
            budget = llm.engine.client.core.scheduler.draft_budget
            if budget is not None:
                budget.is_asking = budget._is_trying = False
                budget._left = 10**9
            passes = PASSES[0]
            add(llm, prompts(rows, 40))
            for _ in range(WARMUP):
                llm.engine.step()
            in_prompts = PASSES[0] - passes
            calls = count(llm)
            of_steps = PASSES[0] - passes - in_prompts
            plain = plain or calls
            total = calls.total() / STEPS
            more = total - plain.total() / STEPS
            print(f"| {name} | {rows} | {total:.0f} | {more:+.0f} | {in_prompts} | {of_steps} |")
            if verbose and calls is not plain:
                show(calls, plain)
            end(llm, rows)


def drafted(rows: int, verbose: bool) -> None:
    many = rows * (1 + DRAFTS)
    plugin = Plugin(steps=[])
    for case, fields in CASES.items():
        with (
            engine(many, plugins=[plugin]) as plain,
            engine(rows, plugins=[plugin], drafter="scripted", draft_budget="all") as speculating,
        ):
            asked = prompts(rows)
            params = SamplingParams(
                **{"max_tokens": 300, "ignore_eos": True, "detokenize": False} | fields
            )
            outputs = plain.generate(
                [{"prompt_token_ids": prompt} for prompt in asked], params, use_tqdm=False
            )
            for prompt, output in zip(asked, outputs, strict=True):
                SCRIPT[tuple(prompt)] = list(output.outputs[0].token_ids)
            found = []
            for llm, given in ((speculating, asked), (plain, prompts(many))):
                add(llm, given, **fields)
                for _ in range(WARMUP):
                    llm.engine.step()
                found.append(count(llm))
                end(llm, len(given))
            with_drafts, without = (calls.total() / STEPS for calls in found)
            ratio = with_drafts / without
            print(f"| {case} | {rows} | {with_drafts:.0f} | {without:.0f} | {ratio:.2f} |")
            if verbose:
                show(*found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--only", default="rest,drafted")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    count_passes()
    sizes = [int(size) for size in args.rows.split(",")]
    if "rest" in args.only:
        print("| drafter at rest | rows | calls | more | passes of prompts | of steps |")
        for rows in sizes:
            rest(rows, args.verbose)
    if "drafted" in args.only:
        print("| sampling | rows | calls with 4 drafts | of as many rows | ratio |")
        for rows in sizes:
            drafted(rows, args.verbose)


if __name__ == "__main__":
    main()
