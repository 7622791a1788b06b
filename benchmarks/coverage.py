"""Counts the classes of transformers that toolkit-lm runs: a tiny random checkpoint of each, and
the engine's results against those of transformers, in float32.

usage: python benchmarks/coverage.py [--mappings causal ...] [--classes NAME ...] [--jobs 1]
       [--write | --check]

Each class has a process of its own, with 120 seconds of CPU time. `--write` replaces the results of
the classes that ran in benchmarks/coverage.json, of which docs/generate_options.py writes
docs/models.md. `--check` fails where a class is worse than its committed result. Results:

native    equal, by a class of this repository
fallback  equal, by the class of transformers
refused   refused when it is loaded, with a reason
differs   other tokens or vectors than those of transformers
fails     another error than a refusal
hangs     120 seconds of CPU time did not do
unbuilt   the recipes make no model of it, or transformers alone cannot run it

A generating class is compared by log probabilities along the engine's tokens, of prompts in chunks;
where they differ from transformers' in float32, with those in float64, by the same tolerance. A
pooling one is compared by all hidden states, or by logits.
"""

from __future__ import annotations

import os

# A process is forked for each class: threads do not survive that.
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import contextlib
import fcntl
import importlib
import json
import multiprocessing
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from coverage_reasons import brief, reason_of
from coverage_runs import MAPPINGS, Case, UnbuiltError, run_of
from toolkit_lm.errors import ToolkitError

RESULTS = Path(__file__).with_name("coverage.json")
CPU_SECONDS = 120
EQUAL = ("native", "fallback")


class Outcome(NamedTuple):
    """One of the results above, and the reason for it."""

    result: str
    reason: str = ""


def cases(mappings: Iterable[str] = MAPPINGS, only: Sequence[str] = ()) -> list[Case]:
    """All classes of these mappings, or those whose name, `model_type` or key is in `only`."""
    found = [
        Case(mapping, model_type, name)
        for mapping in mappings
        for model_type, names in MAPPINGS[mapping].items()
        for name in ([names] if isinstance(names, str) else names)
    ]
    return [case for case in found if not only or {*case[1:], case.key} & set(only)]


def check(case: Case, folder: Path) -> Outcome:
    """Builds the checkpoint, runs it both ways and compares. For a process of its own."""
    try:
        run = run_of(case)
        model = run.save(case, folder)
        run.plain(model)
    except Exception as error:
        return Outcome("unbuilt", brief(error))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            ours = run.engine(folder)
        except ToolkitError as error:
            return Outcome("refused", reason_of(error))
        except UnbuiltError as error:
            return Outcome("unbuilt", str(error))
    by_fallback = any("the fallback " in str(warning.message) for warning in said)
    try:
        run.compare(model, ours)
    except AssertionError as error:
        return Outcome("differs", brief(error))
    return Outcome("fallback" if by_fallback else "native", run.note)


def _child(case: Case, sender: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        with tempfile.TemporaryDirectory() as name:
            outcome = check(case, Path(name))
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        outcome = Outcome("fails", f"{brief(error)} ({Path(place.filename).name}:{place.lineno})")
    sender.send(outcome)


def run(case: Case) -> Outcome:
    """The outcome of a class, in a process of its own."""
    forked = multiprocessing.get_context("fork")
    receiver, sender = forked.Pipe(duplex=False)
    process = forked.Process(target=_child, args=(case, sender))
    process.start()
    sender.close()
    try:
        outcome: Outcome = receiver.recv()
    except EOFError:
        process.join()
        hung = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
        outcome = Outcome("hangs") if hung else Outcome("fails", f"exit code {process.exitcode}")
    process.join()
    return outcome


def import_ahead() -> None:
    """Imports here what a class imports, so that no process does it again."""
    forked = multiprocessing.get_context("fork")
    receiver, sender = forked.Pipe(duplex=False)
    process = forked.Process(target=_scout, args=(sender,))
    process.start()
    for name in receiver.recv():
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    process.join()


def _scout(sender: Any) -> None:
    """Tells which modules two classes need."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with tempfile.TemporaryDirectory() as name:
        for case in cases(["causal", "masked"], ["gpt_neox", "bert"]):
            check(case, Path(name) / case.architecture)
    sender.send([name for name in sys.modules if not name.startswith("__")])


def stored() -> dict[str, list[str]]:
    """The committed results: [result, reason] by key."""
    if not RESULTS.exists():
        return {}
    found: dict[str, list[str]] = json.loads(RESULTS.read_text(encoding="utf-8"))["classes"]
    return found


def write(results: Mapping[str, Outcome]) -> None:
    """Replaces these classes' committed results, and drops those that transformers lacks. Several
    processes may do so at a time."""
    with (Path(tempfile.gettempdir()) / "toolkit-lm-coverage.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _write(results)


def _write(results: Mapping[str, Outcome]) -> None:
    known = {case.key for case in cases()}
    merged = {**stored(), **{key: list(outcome) for key, outcome in results.items()}}
    lines = ",\n".join(
        f"{json.dumps(key)}: {json.dumps(merged[key])}" for key in sorted(known & merged.keys())
    )
    made = RESULTS.with_suffix(".new")
    made.write_text(
        f'{{"transformers": "{transformers.__version__}",\n"classes": {{\n{lines}\n}}}}\n',
        encoding="utf-8",
    )
    made.replace(RESULTS)


def spread(chosen: list[Case], count: int) -> list[Case]:
    """`count` of the classes that can be built, at even distances."""
    known = stored()
    built = [case for case in chosen if known.get(case.key, ["unbuilt"])[0] != "unbuilt"]
    return [built[i * len(built) // count] for i in range(min(count, len(built)))]


def worse(before: Mapping[str, Sequence[str]], now: Mapping[str, Outcome]) -> list[str]:
    """Lines about classes that were equal and are not, or that are wrong."""
    lines = []
    for key, outcome in now.items():
        was = before.get(key, ["new"])[0]
        is_equal = outcome.result in EQUAL
        is_wrong = outcome.result in ("differs", "fails", "hangs") and was != outcome.result
        if is_wrong or (was in EQUAL and not is_equal) or (was == "native" != outcome.result):
            lines.append(f"{key}: was {was}, is {outcome.result} {outcome.reason}")
    return lines


def summary(results: Mapping[str, Sequence[str]]) -> str:
    """Counts of each mapping, as a table."""
    kinds = ("native", "fallback", "refused", "differs", "fails", "hangs", "unbuilt")
    rows = [f"| mapping | {' | '.join(kinds)} | equal of built |", f"| {'--- | ' * 9}".rstrip()]
    for mapping in MAPPINGS:
        counts = Counter(
            value[0] for key, value in results.items() if key.startswith(f"{mapping}/")
        )
        built = counts.total() - counts["unbuilt"]
        equal = sum(counts[kind] for kind in EQUAL)
        if built:
            cells = " | ".join(str(counts[kind]) for kind in kinds)
            rows.append(f"| {mapping} | {cells} | {equal / built:.0%} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mappings", nargs="+", choices=MAPPINGS, default=list(MAPPINGS))
    parser.add_argument("--classes", nargs="+", default=[])
    parser.add_argument("--results", nargs="+", default=[], help="classes with these results only")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="after them no class begins")
    parser.add_argument("--sample", type=int, help="so many classes, spread over the mappings")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    before = stored()
    chosen = [
        case
        for case in cases(args.mappings, args.classes)
        if not args.results or before.get(case.key, ["new"])[0] in args.results
    ]
    if args.sample:
        chosen = spread(chosen, args.sample)
    results: dict[str, Outcome] = {}
    import_ahead()
    begun = time.monotonic()

    def measure(case: Case) -> None:
        if time.monotonic() - begun > args.seconds:
            return
        outcome = run(case)
        results[case.key] = outcome
        print(f"{time.monotonic() - begun:6.0f} s {outcome.result:9} {case.key} {outcome.reason}")
        sys.stdout.flush()
        if args.write:
            write(results)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(measure, chosen))
    print(summary(stored() if args.write else results))
    if args.check and (found := worse(before, results)):
        sys.exit("worse than benchmarks/coverage.json:\n" + "\n".join(found))


if __name__ == "__main__":
    main()
