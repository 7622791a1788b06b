"""Compares the instructions of the kernels of `cpu` with those of an earlier commit.

usage: python benchmarks/kernel_counts.py [--against COMMIT] [--only WORD] [--table]

The kernels of both are compiled here, by one compiler, and each runs its own cases
(`kernel_cases.py`), so that no figures are kept and processors may differ. The processor's counter
counts, with all instruction sets that the processor has; where it may not, callgrind does, whose
processor has AVX2 and no AVX-512. Exit code 1 where a case takes over 3% more than before. Without
`--against`, the earlier commit is the last one: HEAD if the kernels are changed in the work tree,
else the one before it. Where the kernels are the same, nothing is counted.

A commit that makes a case dearer for a reason says so in its message, a line per case or word of
it:

Dearer-kernel: rope: angles are in float64 now
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
PACKAGE = "contrib_backends/cpu"
KERNELS = f"{PACKAGE}/src/toolkit_lm_cpu/kernels"
COMPILE = f"{PACKAGE}/compile.py"
CASES = "benchmarks/kernel_cases.py"
MEMORY = "benchmarks/kernel_memory.py"
SOURCES = (KERNELS, COMPILE)
TOLERANCE = 0.03
COLLECTOR = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; }
void stop(void) { CALLGRIND_STOP_INSTRUMENTATION; CALLGRIND_DUMP_STATS; }
"""
ONE_COUNT = "import kernel_cases; kernel_cases.PerfCounter()"


class LeftOutError(Exception):
    """Why nothing can be counted here."""


def git(*arguments: str) -> bytes:
    if shutil.which("git") is None:
        raise LeftOutError("git is not installed")
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True)
    if done.returncode:
        raise LeftOutError(f"git {' '.join(arguments)}: {done.stderr.decode().strip()}")
    return done.stdout


def earlier_commit() -> str:
    is_changed = bool(git("status", "--porcelain", "--", *SOURCES))
    return "HEAD" if is_changed else "HEAD~1"


def check_out(commit: str, folder: Path) -> None:
    """The kernels of a commit, and its cases, as far as it has such."""
    names = git("ls-tree", "--name-only", commit, CASES, MEMORY, COMPILE).decode().split()
    content = git("archive", "--format=tar", commit, KERNELS, *names)
    with tarfile.open(fileobj=BytesIO(content)) as archive:
        archive.extractall(folder, filter="data")


def compile_kernels(tree: Path, library: Path) -> Path:
    """Raises LeftOutError where they cannot be compiled."""
    spec = importlib.util.spec_from_file_location("compile_hook", tree / COMPILE)
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    reason = hook.compile_kernels(tree / KERNELS / "module.c", library)
    if reason is not None:
        raise LeftOutError(f"the kernels are not compiled: {reason}")
    return library


def has_counter() -> bool:
    """Whether the processor's counter may count here."""
    command = [sys.executable, "-c", ONE_COUNT]
    done = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True)
    return done.returncode == 0


def compile_collector(folder: Path) -> Path:
    """The library by which cases start and stop callgrind. Raises LeftOutError without it."""
    if shutil.which("valgrind") is None:
        raise LeftOutError("neither the processor's counter nor valgrind counts instructions here")
    source = folder / "collector.c"
    source.write_text(COLLECTOR)
    library = folder / "collector.so"
    command = ["cc", "-shared", "-fPIC", str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise LeftOutError(f"valgrind's headers are needed: {done.stderr.strip()}")
    return library


def count(library: Path, cases: Path, only: str, collector: Path | None) -> dict[str, int]:
    """Instructions by case. `collector`: callgrind counts."""
    command = [sys.executable, str(cases), str(library), "--only", only]
    # The counts hold the call out of Python, in which texts are compared by their hashes.
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    if collector is None:
        return run(command, environment)
    with TemporaryDirectory() as folder:
        out = Path(folder, "out")
        valgrind = ["valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no"]
        command = [*valgrind, f"--callgrind-out-file={out}", *command]
        names = run([*command, "--collector", str(collector)], environment)
        texts = [Path(f"{out}.{number}").read_text() for number, _ in enumerate(names, 1)]
    totals = [re.search(r"^totals: (\d+)", text, re.MULTILINE) for text in texts]
    return {name: int(total[1]) for name, total in zip(names, totals, strict=True) if total}


def run(command: list[str], environment: Mapping[str, str]) -> dict[str, int]:
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} failed:\n{done.stderr}")
    counts: dict[str, int] = json.loads(done.stdout)
    return counts


def dearer(before: Mapping[str, int], now: Mapping[str, int], reasons: list[str]) -> Iterator[str]:
    """Cases that take more than before by more than the tolerance, without a reason."""
    words = [reason.split(": ")[0] for reason in reasons]
    for name in sorted(before.keys() & now.keys()):
        if now[name] > before[name] * (1 + TOLERANCE) and not any(word in name for word in words):
            more = now[name] / before[name] - 1
            yield f"{name}: {now[name]:,} instructions, {more:+.1%}, over {TOLERANCE:.0%}"


def compare(against: str, only: str) -> tuple[dict[str, int], dict[str, int]]:
    """Counts of a commit, and of the work tree."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        collector = None if has_counter() else compile_collector(folder)
        tree = folder / "tree"
        check_out(against, tree)
        with ThreadPoolExecutor(2) as pool:
            old = pool.submit(compile_kernels, tree, folder / "before.so")
            new = pool.submit(compile_kernels, ROOT, folder / "now.so")
            cases = tree / CASES if (tree / CASES).exists() else ROOT / CASES
            before = pool.submit(count, old.result(), cases, only, collector)
            now = pool.submit(count, new.result(), ROOT / CASES, only, collector)
            print("counted by", "callgrind" if collector else "the processor's counter")
            return before.result(), now.result()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against")
    parser.add_argument("--only", default="")
    parser.add_argument("--table", action="store_true", help="all counts")
    args = parser.parse_args()
    try:
        against = args.against or earlier_commit()
        if not git("diff", "--name-only", against, "--", *SOURCES):
            print(f"The kernels are those of {against}.")
            return 0
        before, now = compare(against, args.only)
        trailers = "--format=%(trailers:key=Dearer-kernel,valueonly)"
        reasons = git("log", trailers, f"{against}..HEAD").decode().split("\n")
    except LeftOutError as error:
        print(f"The instructions of the kernels are not compared: {error}")
        return 0
    for name in now if args.table else []:
        change = f"{now[name] / before[name] - 1:+.2%}" if name in before else "new"
        print(f"{now[name]:>12,} {change:>8}  {name}")
    print(f"{len(now)} cases, {len(before.keys() & now.keys())} of them as in {against}")
    problems = list(dearer(before, now, [reason for reason in reasons if reason]))
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
